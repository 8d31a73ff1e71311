"""A hard day for a server: everything at once, and every answer checked.

    make soak MINUTES=2            # KILLS=10: and that often killed in the middle; SEED=…

plan.py      the requests of a seed, and their answers on an idle server
clients.py   a mix of chats, fan-outs, repeats, aborts and timeouts, each answer compared
weather.py   what happens to storage meanwhile: damage, a full disk, a volume that is away, a restart
server.py    the server, its log, and what its processes hold
report.py    the table and the last line
"""
