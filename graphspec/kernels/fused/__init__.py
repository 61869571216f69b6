"""Triton kernels, one file per op. The contract of an op is in the file of the same name in :mod:`graphspec.kernels`.

Nothing here is imported unless ``kernels.mode=fused`` is chosen, so a machine that runs the references needs no Triton. Every file has the
kernels, a *launcher* (a function with the op's signature) and ``OP``, the launcher registered with ``torch.library`` so that compiled
regions see one opaque operator. ``AOT`` lists calls on ``meta`` tensors in the shapes of real models; :mod:`graphspec.kernels.fused.aot`
compiles their kernels without a GPU.
"""
