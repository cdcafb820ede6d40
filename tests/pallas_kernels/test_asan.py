"""`make asan` sees what it is there for: a kernel that reads one element past a buffer of XLA's."""

from __future__ import annotations

from pathlib import Path

from tests.pallas_kernels import asan

SOURCE = """
#include "xla/ffi/api/ffi.h"
namespace ffi = xla::ffi;

ffi::Error peek(ffi::Buffer<ffi::F32> x, ffi::ResultBuffer<ffi::F32> y, int64_t at) {
  *y->typed_data() = x.typed_data()[at];
  return ffi::Error::Success();
}
XLA_FFI_DEFINE_HANDLER_SYMBOL(Peek, peek, ffi::Ffi::Bind().Arg<ffi::Buffer<ffi::F32>>()
                              .Ret<ffi::Buffer<ffi::F32>>().Attr<int64_t>("at"));
"""
SCRIPT = """
import pathlib, sys
import jax, numpy as np
from pallas_kernels import native
from tests.pallas_kernels import asan

target = native.load((pathlib.Path(sys.argv[1]),), asan.FLAGS).target("Peek")
call = jax.ffi.ffi_call(target, jax.ShapeDtypeStruct((), np.float32))
for size in (4, 100, 5000):
    print("inside", float(call(np.ones(size, np.float32), at=np.int64(size - 1))), flush=True)
call(np.ones(int(sys.argv[2]), np.float32), at=np.int64(sys.argv[2])).block_until_ready()
print("not noticed")
"""


def test_one_element_past_a_buffer_is_an_error(tmp_path: Path) -> None:
    source = tmp_path / "cpu.cc"
    source.write_text(SOURCE)
    for size in ("4", "5000"):
        done = asan.run(["-c", SCRIPT, str(source), size], capture_output=True, timeout=300)
        assert done.stdout == "inside 1.0\n" * 3, done.stderr[-2000:]
        assert done.returncode == asan.EXIT_CODE
        assert "AddressSanitizer: heap-buffer-overflow" in done.stderr
        assert "READ of size 4" in done.stderr and "0 bytes after" in done.stderr.replace(
            "0 bytes to the right of", "0 bytes after"
        )
