"""GPU kernels of trace-store: guided rounding in a trainer, packing and quantizing in a rollout.

Importing this package or its modules needs neither CuPy nor a GPU; launching without them raises
``trace_store.errors.Unsupported``, which says what to install. torch users call ``trace_kernels.torch_op``, whose
operators run the NumPy oracle on CPU tensors. The modules ``guided_round``, ``quantize``, ``pack`` and ``discrepancy``
take device arrays and caller-owned outputs. Layouts, equations and measured speed are in ``kernels/README.md``.
"""
