"""Memory of weights: aligned, disjoint, given back, adopted by jax without a copy."""

import gc

import jax
import numpy as np

from pallas_kernels import memory


def test_arrays_are_aligned_and_disjoint():
    shapes = [(3,), (100_001,), (64, 1024), (5, 7, 9_999), (40 << 20,), (0, 4)]
    arrays = [memory.aligned_empty(shape, np.uint8) for shape in shapes]
    for number, array in enumerate(arrays):
        assert array.ctypes.data % memory.ALIGN == 0 or array.size == 0
        assert array.flags.c_contiguous and array.flags.writeable
        array[...] = number
    for number, array in enumerate(arrays):
        assert (array == number).all()


def test_jax_adopts_the_buffer():
    array = memory.aligned_empty((1 << 20,), np.float32)
    array[...] = 1.0
    adopted = jax.device_put(array)
    assert adopted.unsafe_buffer_pointer() == array.ctypes.data
    address = array.ctypes.data
    del array
    gc.collect()
    # the device array alone keeps the memory
    assert adopted.unsafe_buffer_pointer() == address and float(adopted.sum()) == 1 << 20


def resident_kb() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4


def test_a_chunk_is_given_back():
    before = resident_kb()
    arrays = [memory.aligned_empty((12 << 20,), np.uint8) for _ in range(20)]
    for array in arrays:
        array[...] = 1
    assert resident_kb() - before > 200_000
    del array, arrays
    gc.collect()
    assert resident_kb() - before < 100_000
