"""What the commands of the GPU page make of kernels: which of them copy, and what runs beside transfers."""

import pytest
from benchmarks.gpu_step.copies import Kind, kind_of, kind_of_source
from benchmarks.gpu_step.overlap import Beside, Kernel, beside

SOURCE = """
    x0 = xindex % 4
    tmp0 = tl.load(in_ptr0 + ({}), xmask)
    {}
    tl.store(out_ptr0 + ({}), tmp{}, xmask)
"""


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (SOURCE.format("x0 + 4*x1", "", "x1 + 8*x0", 0), "format"),
        (SOURCE.format("x2", "tmp1 = tmp0.to(tl.float32)", "x2", 1), "same"),
        (SOURCE.format("x0 + 4*x1", "tmp1 = tmp0 + tmp0", "x1 + 8*x0", 1), ""),
    ],
)
def test_a_kernel_of_inductor_copies_by_its_source(body: str, expected: Kind) -> None:
    assert kind_of_source(body) == expected


@pytest.mark.parametrize(
    ("kernel", "expected"),
    [
        ("void at::native::elementwise_kernel<128, 4, gpu_kernel_impl_nocast<direct_copy_kernel_cuda(...", "format"),
        ("void at::native::vectorized_elementwise_kernel<8, at::native::bfloat16_copy_kernel_cuda(...", "same"),
        ("void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda(...", "same"),
        ("void cudnn::engines_precompiled::nchwToNhwcKernel<__nv_bfloat16>", "format"),
        ("Memcpy DtoD (Device -> Device)", "same"),
        ("sm90_xmma_fprop_implicit_gemm_bf16", ""),
        ("triton_poi_fused_clone_slice_7", "part"),
        ("triton_poi_fused_clone_3", "format"),
        ("triton_poi_fused_add_1", ""),
    ],
)
def test_other_kernels_copy_by_their_names(kernel: str, expected: Kind) -> None:
    assert (
        kind_of(kernel, {"triton_poi_fused_clone_slice_7": "format", "triton_poi_fused_clone_3": "format"}) == expected
    )


def test_time_of_transfers_is_counted_once_beside_whatever_runs() -> None:
    kernels = [
        Kernel("conv", 7, 0.0, 10.0),
        Kernel("relu", 8, 5.0, 12.0),  # at the same time as `conv`
        Kernel("ncclDevKernel_SendRecv(args)", 9, 8.0, 20.0),
        Kernel("ncclDevKernel_AllReduce_Sum_f32(args)", 9, 20.0, 24.0),
        Kernel("conv", 7, 23.0, 30.0),
    ]
    assert beside(kernels) == [Beside("AllReduce", 9, 1, 4.0, 1.0), Beside("SendRecv", 9, 1, 12.0, 4.0)]
