"""Refusals and failures of real libraries that depend on versions and devices, each a switch."""

from dataclasses import dataclass, fields


@dataclass
class Switches:
    """What is refused, or fails, in addition; all off by default."""

    #: cuBLASLt takes at most 65,535 matrices in a call (``kMaxBatchCount`` in XLA, PyTorch issue 46001).
    large_batches: bool = False
    #: Block-scaled products need m and n in multiples of 16, and k of 32 (vllm issue 4691, nvmath-python issue 52).
    block_extents: bool = False
    #: FP4 operands with a bias and no activation (CUDALibrarySamples issue 303).
    fp4_bias: bool = False
    #: FP8 operands without pointers to scales (openxla/xla issue 40747).
    float8_scales: bool = False
    #: int8 operands with a workspace: PyTorch's ``int8_gemm`` passes none.
    int8_workspace: bool = False
    #: The first algorithm of each search fails when it runs, with status 13 (rapidsai/raft issue 3098).
    first_algorithm: bool = False
    #: cuBLASLt and cuSPARSELt take the default streams by no other handle than 0.
    default_streams: bool = False
    #: ``cudaFree`` does not wait for the device: the runtime's header says that it "may".
    free_without_wait: bool = False

    @classmethod
    def all(cls):
        """Return the switches, all on."""
        return cls(**{x.name: True for x in fields(cls)})
