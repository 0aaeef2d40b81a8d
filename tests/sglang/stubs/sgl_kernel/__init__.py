"""SGLang's kernels: see `gpu_only`. The torch-native attention and PyTorch's sampler call none of them."""

from gpu_only import stand_in

stand_in(__name__)
