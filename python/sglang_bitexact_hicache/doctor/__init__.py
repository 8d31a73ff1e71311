"""The doctor: whether the feature fits an installation, a server's flags, or a running server.

`command.py` is the command line; `report.py` what it prints; each other module answers one question with
findings. The facts themselves are defined where the feature uses them (seams, engagement, refusals,
options, sizing, layout, exporter), never here.
"""
