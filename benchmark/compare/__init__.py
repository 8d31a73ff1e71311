"""Off against dev on a whole server, measured with SGLang's own clients; see docs/compare.md.

* ``options``: the command line and the sizes that it stands for.
* ``arms``: what differs between the servers, and how each comes up.
* ``workloads``: what the clients are asked to send, and the small data files that they need.
* ``clients``: the client processes and what their output says.
* ``counters``: what the server itself counted.
* ``measure``: all passes of one arm.
* ``report``: the table, the last line, what does not hold.

Standard library and tabulate only; SGLang runs in processes of its own.
"""
