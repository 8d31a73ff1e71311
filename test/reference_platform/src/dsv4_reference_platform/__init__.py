"""Test-only SGLang platform that serves DeepSeek-V4 on unified_kv on any CPU, and on an NVIDIA GPU.

Imported at interpreter start by a .pth file, so this module stays empty and cheap.

* ``activation``: the two SGLang entry points (platform, plugin).
* ``platform_base``, ``cpu_platform``, ``cuda_platform``: the platform class of each device.
* ``install``: one table of every SGLang name that is replaced, and the code that replaces it.
* ``kernels``: plain torch kernels under the names of the stock ones.
* ``invariant``: matrix products whose rows do not depend on the batch around them.
* ``weights``: seeded parameters for ``--load-format dummy``.
* ``launch``: start, ask and stop a server (demo and tests use this).
* ``watchdog``: ends a server whose parent is gone.
* ``sgl_kernel_shim``: on a GPU, tells SGLang that sgl_kernel is not there.
* ``torchvision_shim``: lets PyPI's torchvision be imported beside a CPU torch.
* ``poke``: test-only access to the pools of a running server.
"""
