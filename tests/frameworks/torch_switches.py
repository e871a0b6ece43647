"""PyTorch's switches for the precision of float32 products, all of them."""

LEAVES = [(backend, operation) for backend in ("cuda", "mkldnn") for operation in ("matmul", "conv", "rnn")]
ALL = [("generic", "all"), ("cuda", "all"), ("mkldnn", "all")]


class Switches:
    """The switches by name, with their start state."""

    def __init__(self, torch):
        self.torch = torch
        self.get = torch._C._get_fp32_precision_getter
        self.put = torch._C._set_fp32_precision_setter

    def reset(self):
        self.torch.set_float32_matmul_precision("highest")
        self.torch._C._set_cudnn_allow_tf32(True)
        for pair in [*ALL, *LEAVES]:
            # CUDA's convolutions start with TF32.
            self.put(*pair, "tf32" if pair in (("cuda", "conv"), ("cuda", "rnn")) else "none")

    def read(self):
        """Return the values as a user reads them, refusals included."""

        def tried(getter):
            try:
                return getter()
            except RuntimeError:
                return "refused"

        found = {f"{backend}.{operation}": self.get(backend, operation) for backend, operation in [*ALL, *LEAVES]}
        old = ("_get_float32_matmul_precision", "_get_cudnn_allow_tf32", "_get_cublas_allow_tf32")
        return {**found, **{name: tried(getattr(self.torch._C, name)) for name in old}}
