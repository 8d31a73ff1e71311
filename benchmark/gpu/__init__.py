"""What capture and restore cost on a GPU, and whether they are exact on real kernels: `python -m gpu`.

needs.py       what a machine needs for it
runner.py      its parts, one after the other
config.py      the model's shape, its cost a token, the sizes of a run
stubs.py       makes SGLang importable and its unified_kv path reachable where this is no ROCm
stock.py       SGLang's own pool and attention backend, and the kernels that are compiled at run time
inputs.py      rows that stand for the projections of a layer
stack.py       the layers: real compressors, real attention, nothing else
strict.py      nothing of ours may wait for the device
feature.py     the plugin's runtime on that stack; stand-ins for the tree and the requests
kernel_cases.py   each kernel against its plain torch reference (a script of its own, too)
exactness.py   restored is equal to uninterrupted, and each negative control is not
floors.py      what the machine can do
timing.py      how time on the device and on the host is taken
bench.py       what the measurements share
launches.py    the largest launches against the floor of their bytes
capture.py, restore.py, decode.py   what each of them costs
report.py      tables, raw numbers, the last line
"""
