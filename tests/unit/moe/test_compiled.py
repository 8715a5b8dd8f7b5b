"""The cache of the compiled products: nothing is loaded that others could have written, that has changed, or that is wrong."""

from __future__ import annotations

import ctypes
import os
import shutil
import stat
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

from recipes.moe import compiled as compiled_library
from recipes.moe import products

ROOT = Path(__file__).resolve().parents[3]
IS_ROOT = os.geteuid() == 0
COMPILE_TO = products.compile_to
OTHER = 54321  # a user that is not this one


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("built") / "products.so"
    products.compile_to(path, products.FLAGS)
    return path


@pytest.fixture
def compiled() -> list[str]:
    """What was compiled."""
    return []


@pytest.fixture
def cache(tmp_path, monkeypatch, built, compiled):
    """The folder of an empty cache; compiling takes no time, and nothing is remembered."""

    def compile_to(path: Path, flags: object) -> None:
        compiled.append(path.name)
        shutil.copyfile(built, path)

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(products, "compile_to", compile_to)
    products.kernel.cache_clear()
    yield tmp_path / "sparse-pretraining-recipes"
    products.kernel.cache_clear()


def works() -> bool:
    """Whether there is a kernel now, without a word, and it multiplies."""
    products.kernel.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        product = products.kernel()
    out = torch.empty(3, 4)
    if product is not None:
        product(torch.full((3, 5), 2.0), torch.full((5, 4), 3.0), out)
    return product is not None and bool((out == 30.0).all())


def refused(match: str) -> None:
    products.kernel.cache_clear()
    with pytest.warns(UserWarning, match=match) as seen:
        assert products.product_for(torch.empty(1)) is products.by_torch
    assert len(seen) == 1


def library(cache: Path) -> Path:
    (found,) = cache.iterdir()
    return found


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


@pytest.fixture
def other(tmp_path) -> Path:
    """A library that returns other products: it multiplies nothing."""
    source, built = tmp_path / "other.c", tmp_path / "other.so"
    source.write_text("int multiply() { return 0; }")
    subprocess.run(["cc", "-shared", "-fPIC", str(source), "-o", str(built)], check=True)
    return built


def test_only_this_user_can_read_and_write_it(cache):
    old = os.umask(0)
    try:
        assert works()
    finally:
        os.umask(old)
    assert mode(cache) == 0o700 and mode(library(cache)) == 0o600
    cache.chmod(0o755)
    assert works() and mode(cache) == 0o700


def change(content: bytes, what: str) -> bytes:
    if what == "cut off":
        return content[: len(content) // 2]
    if what == "empty":
        return b""
    at = content.index(b"\x7fELF") + len(content) // 2
    return content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]


@pytest.mark.parametrize(
    "what", ["cut off", "empty", "one bit", "another library", "a link", "a pipe", "others may write"]
)
def test_what_is_not_the_library_is_compiled_again(cache, compiled, other, what):
    assert works()
    path = library(cache)
    content = path.read_bytes()
    if what == "a link":
        other.write_bytes(content)
        path.unlink()
        path.symlink_to(other)
    elif what == "a pipe":
        path.unlink()
        os.mkfifo(path)
    elif what == "others may write":
        path.chmod(0o666)
    else:
        path.write_bytes(other.read_bytes() if what == "another library" else change(content, what))
    compiled.clear()
    assert works() and len(compiled) == 1
    path = library(cache)
    assert stat.S_ISREG(path.lstat().st_mode) and mode(path) == 0o600
    assert works() and len(compiled) == 1


@pytest.mark.skipif(not IS_ROOT, reason="only root can give files away")
def test_what_belongs_to_another_user_is_not_loaded(cache):
    assert works()
    path = library(cache)
    content = path.read_bytes()
    os.chown(path, OTHER, OTHER)
    assert works() and library(cache).stat().st_uid == 0 and library(cache).read_bytes() == content
    os.chown(cache, OTHER, OTHER)
    refused(f"{cache} belongs to user {OTHER}, not to 0")


def test_a_folder_that_others_can_change_is_not_used(cache):
    cache.mkdir()
    cache.chmod(0o777)
    refused(rf"{cache} can be written by others \(mode 777\)")
    assert not list(cache.iterdir())


def test_a_folder_that_is_a_link_is_not_used(cache, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    cache.symlink_to(tmp_path / "elsewhere")
    refused(f"{cache}")
    assert not list((tmp_path / "elsewhere").iterdir())


@pytest.mark.parametrize("home", ["", "relative", "/proc/nowhere"])
def test_without_a_usable_home(cache, monkeypatch, home):
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", home)
    refused("must be an absolute path" if not home.startswith("/") else "/proc/nowhere")


def test_where_there_are_no_files_in_memory(cache, monkeypatch):
    monkeypatch.delattr(os, "memfd_create")
    refused("no files in memory")


PLANTED = {
    "sums": ("sums[r][v] += a[r] * columns[v]", "sums[r][v] += a[r] * columns[v] * 1.001f", ()),
    "sums by AVX2": ("sums[r][v] += a[r] * columns[v]", "sums[r][v] += a[r] * columns[v] * 1.001f", ("-mno-avx512f",)),
    "streams": ("stream(to, sums[r][v])", "stream(to, sums[r][v] + sums[r][v])", ()),
    "gathered rows": ("(order ? order[i] : i)", "i", ()),
}


@pytest.fixture
def compiler(cache, monkeypatch):
    """The real one, in a hurry."""
    monkeypatch.setattr(products, "compile_to", COMPILE_TO)
    monkeypatch.setattr(products, "FLAGS", ("-O1", *products.FLAGS[1:]))


@pytest.mark.parametrize("plant", PLANTED)
def test_wrong_products_are_not_used(cache, compiler, tmp_path, monkeypatch, plant):
    right, wrong, flags = PLANTED[plant]
    text = products.SOURCE.read_text()
    assert right in text
    source = tmp_path / "products.cpp"
    source.write_text(text.replace(right, wrong))
    monkeypatch.setattr(products, "SOURCE", source)
    monkeypatch.setattr(products, "FLAGS", (*products.FLAGS, *flags))
    refused(r"products\.cpp cannot be used \(.*\.so: its product \d+ x \d+ x \d+ is wrong\)")
    assert not list(cache.iterdir())  # a mended compiler gets another chance


@pytest.mark.parametrize("code", ["int other() { return 0; }", "int multiply() { return 0; }"])
def test_a_library_of_something_else_is_not_used(cache, compiler, tmp_path, monkeypatch, code):
    """Even one that is properly in the cache."""
    source = tmp_path / "products.cpp"
    source.write_text(f'extern "C" {code}')
    monkeypatch.setattr(products, "SOURCE", source)
    refused(r"products\.cpp cannot be used \(.*\.so: ")


def test_each_way_to_multiply_is_checked():
    """A product that is wrong in one of them only."""

    def faulty(hit):
        def run(a, b, out, a_rows, b_rows, slope_at, gelu, streams):
            products.by_torch.run(a, b, out, a_rows, b_rows, slope_at, gelu, streams)
            hit(a, b, out, a_rows, b_rows, slope_at, gelu, streams)

        return products.Product(run)

    products.check(products.by_torch)
    faults = [
        lambda a, b, out, *rest: out[-1].mul_(1.0001),
        lambda a, b, out, a_rows, b_rows, slope_at, gelu, streams: out[0].add_(float(streams)),
        lambda a, b, out, a_rows, b_rows, slope_at, gelu, streams: slope_at is not None and out.neg_(),
        lambda a, b, out, a_rows, b_rows, slope_at, gelu, streams: gelu is not None and gelu[:, 0].zero_(),
        lambda a, b, out, a_rows, b_rows, slope_at, gelu, streams: a_rows is not None and out[0].zero_(),
        lambda a, b, out, a_rows, b_rows, slope_at, gelu, streams: b_rows is not None and out[0].zero_(),
        lambda a, b, out, *rest: out[0, 0].fill_(float("nan")),
        lambda a, b, out, *rest: out.as_strided(
            (1,), (1,), out.storage_offset() + out.shape[1]
        ).zero_(),  # beyond a row
        lambda a, b, out, *rest: out.zero_() if a.shape[1] > 512 else None,
        lambda a, b, out, *rest: out.zero_() if a.stride(1) != 1 else None,
        lambda a, b, out, *rest: out.zero_() if b.stride(1) != 1 else None,
    ]
    for number, fault in enumerate(faults):
        with pytest.raises(products.UnusableError):
            products.check(faulty(fault))
            pytest.fail(f"fault {number} was not seen")


def test_a_file_that_is_cut_off_later_does_no_harm(cache):
    """A file that is mapped into memory would end the process with a bus error."""
    assert works()
    product = products.kernel()
    with library(cache).open("r+b") as file:
        file.truncate(0)
    a, b, out = torch.randn(300, 600), torch.randn(600, 200), torch.empty(300, 200)
    product(a, b, out, gelu=torch.empty_like(out))
    torch.testing.assert_close(out, a @ b, rtol=1e-4, atol=1e-4)


def test_processes_that_compile_at_once(cache):
    """Each gets what it compiled; whoever comes later gets one of these, whole."""
    code = "import os, sys, time; from pathlib import Path; from recipes.moe.compiled import cached\n"
    code += "def compile_to(path): time.sleep(0.5); path.write_bytes(os.urandom(100000))\n"
    code += "path, library = cached(Path(sys.argv[1]), 'key', compile_to); assert path.read_bytes() == library"
    command = [sys.executable, "-c", code, str(cache)]
    processes = [subprocess.Popen(command, cwd=ROOT) for _ in range(4)]
    assert [process.wait(55) for process in processes] == [0, 0, 0, 0]
    files = list(cache.iterdir())
    assert 1 <= len(files) <= 4 and all(path.suffix == ".so" for path in files)
    path, library = compiled_library.cached(cache, "key", lambda path: pytest.fail("compiled again"))
    assert path in files and path.read_bytes() == library


def test_the_loader_maps_no_file(cache):
    assert works()
    with open("/proc/self/maps") as maps:
        assert str(cache) not in maps.read()
    assert ctypes.CDLL(str(products.loadable(library(cache).read_bytes()))).multiply
