"""The codecs on a GPU give the bits that they give on the host. One GPU is enough."""

from __future__ import annotations

import functools
import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.device_code import Kernel
from tests.codecs import samples
from tests.codecs.conversions import CONVERSIONS, DEVICE_SOURCE, FOLDER, NUMBERS, HostConversions, prepare

pytestmark = pytest.mark.gpu

BLOCKS, THREADS = 256, 256


@functools.cache
def on_host(folder: Path) -> HostConversions:
    return HostConversions(folder)


@functools.cache
def kernel() -> Kernel:
    return Kernel("codecs", DEVICE_SOURCE, "convert", include_dirs=(FOLDER, "."))


def on_gpu(name: str, source: np.ndarray) -> np.ndarray:
    given, result, count = prepare(name, source)
    held = torch.from_numpy(given.view(np.uint8)).cuda()
    filled = torch.full((result.nbytes,), 0xA5, dtype=torch.uint8, device="cuda")
    addresses = held.data_ptr(), filled.data_ptr()
    kernel()(BLOCKS, THREADS, NUMBERS[name], *addresses, count, torch.cuda.current_stream())
    return filled.cpu().numpy().view(result.dtype)


def compare(name: str, folder: Path) -> tuple[int, list[str]]:
    """How many elements were converted, and the first ones that differ."""
    convert = on_host(folder)
    source = samples.inputs(name, convert)
    expected, found = convert(name, source), on_gpu(name, source)
    bits = np.dtype(f"u{expected.itemsize}")
    wrong = np.nonzero(expected.view(bits) != found.view(bits))[0]
    step = len(expected) / len(source)
    return len(source), [f"{source[int(i / step)]!r}: {found[i]!r}, not {expected[i]!r}" for i in wrong[:10]]


@pytest.fixture(scope="module")
def process() -> Iterator[ProcessPoolExecutor]:
    """One that uses the GPU, so that this one does not."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield pool


@pytest.mark.parametrize("name", CONVERSIONS)
def test_bits_are_those_of_the_host(process: ProcessPoolExecutor, tmp_path_factory: pytest.TempPathFactory, name: str):
    count, differences = process.submit(compare, name, tmp_path_factory.getbasetemp()).result(timeout=120)
    assert differences == []
    assert count >= (256 if name.startswith("decode e") else 1 << 16)
