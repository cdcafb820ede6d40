"""llama.cpp as a peer, through llama-cpp-python: on a GGUF file as it is, or on its float32 twin.

llama.cpp is measured at its best: the binding's `eval` of one token and an argmax over the logits
it leaves, without the binding's sampler chain; as many threads as cores; everything else as the
binding sets it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from jetspec_jax.errors import ModelFileError
from jetspec_jax.weights.dequant import dequantize
from jetspec_jax.weights.gguf_file import GGUFFile
from serve.peer_worker import Worker

FLAG = "--llama-python"
PACKAGES = "llama-cpp-python"

_SCRIPT = """
def load(path, context, threads):
    import llama_cpp, numpy
    threads = int(threads)
    model = llama_cpp.Llama(
        path, n_ctx=int(context), n_threads=threads, n_threads_batch=threads, verbose=False)
    vocabulary = model.n_vocab()

    def decode(ids, max_tokens):
        model.reset()
        model.eval(ids[:-1])
        out, token = [], ids[-1]
        began = time.perf_counter()
        for _ in range(max_tokens):
            model.eval([token])
            logits = llama_cpp.llama_get_logits_ith(model.ctx, -1)
            token = int(numpy.ctypeslib.as_array(logits, (vocabulary,)).argmax())
            out.append(token)
        return out, time.perf_counter() - began

    hello = {"llama-cpp-python": llama_cpp.__version__, "threads": threads}
    return hello | {"system": llama_cpp.llama_print_system_info().decode().strip()}, decode
"""


def start(python: str, model: Path, context: int, threads: int) -> Worker:
    """llama.cpp on one GGUF file. Raises what `Worker` raises."""
    return Worker(FLAG, python, _SCRIPT, (model, context, threads), PACKAGES)


def write_f32_gguf(source: Path, target: Path) -> Path:
    """A float32 GGUF of exactly our dequantised weights, metadata and row order as in `source`.

    Args:
        source: a GGUF file of any type that we read.
        target: the file to write; 4 bytes per weight.

    Raises:
        ModelFileError: `source` cannot be read, or the package `gguf` is missing.
    """
    try:
        import gguf  # of the extra "test", not needed to run
    except ImportError as error:
        raise ModelFileError(
            "the float32 GGUF is written with the package 'gguf', which is not installed; "
            "run: make dev"
        ) from error
    file = GGUFFile(source)
    metadata = {**file.metadata, "general.file_type": int(gguf.LlamaFileType.ALL_F32)}
    writer = gguf.GGUFWriter(target, str(metadata.pop("general.architecture")))
    for key, value in metadata.items():
        _add(writer, gguf.GGUFValueType, key, value)
    for info in file.tensors.values():
        size = 4 * int(np.prod(info.shape))
        writer.add_tensor_info(info.name, info.shape, np.dtype(np.float32), size)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for info in file.tensors.values():  # one by one: the whole does not have to fit twice
        writer.write_tensor_data(dequantize(file.blocks(info.name), info.type_name))
    writer.close()
    return target


def _add(writer: Any, types: Any, key: str, value: Any) -> None:
    """One metadata entry. Our reader keeps no widths of scalars; GGUF's usual ones are 32 bits."""
    if isinstance(value, np.ndarray):
        prefix = {"i": "INT", "u": "UINT", "f": "FLOAT", "b": "BOOL"}[value.dtype.kind]
        bits = "" if prefix == "BOOL" else str(8 * value.dtype.itemsize)
        writer.add_key_value(key, value.tolist(), types.ARRAY, sub_type=types[prefix + bits])
    elif isinstance(value, list):
        writer.add_key_value(key, value, types.ARRAY, sub_type=types.STRING)
    elif isinstance(value, bool):
        writer.add_key_value(key, value, types.BOOL)
    elif isinstance(value, int):
        kind = types.UINT32 if 0 <= value < 1 << 32 else types.INT64
        writer.add_key_value(key, value, kind)
    elif isinstance(value, float):
        writer.add_key_value(key, value, types.FLOAT32)
    else:
        writer.add_key_value(key, value, types.STRING)
