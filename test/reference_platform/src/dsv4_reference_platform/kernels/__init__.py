"""Plain torch kernels of the reference platform, one module per family of stock kernels.

Every public function carries the name and the signature of the SGLang 0.5.23 kernel (or kernel
wrapper) that it stands for; the docstring says which one. Three rules hold for all of them:

* right: the formula is the stock kernel's, evaluated in fp32;
* deterministic: no atomics, no data-dependent choice of algorithm;
* invariant: the bits computed for one token depend on that token's own inputs only, not on the
  chunk it arrived in, on its place in the batch or on the other requests. Three things break
  this on a CPU and are avoided: matrix products whose shape follows the batch (all products run
  in fixed tiles, see ``matmul.py`` and ``attention.py``), sums whose order follows the batch
  (rows are anchored at absolute positions), and library functions whose vector body and scalar
  tail round differently (``torch.sigmoid``, ``silu`` and ``softplus`` do; see ``elementwise.py``).
"""
