"""Our matrix product against float64: every shape and order of its factors, for the vectors of two kinds of processors; what
it writes and what not; the same bits for a row whatever is multiplied with it; and what happens without a compiler."""

from __future__ import annotations

import contextlib
import itertools
import platform
import random
import sys
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recipes.moe import products

KINDS = {"native": (), "avx2": ("-mno-avx512f",)}


@pytest.fixture(scope="module", params=KINDS)
def multiply(request, tmp_path_factory):
    library = tmp_path_factory.mktemp("products") / "products.so"
    products.compile_to(library, (*products.FLAGS, *KINDS[request.param]))
    return products.load(library)


@pytest.fixture
def fresh(tmp_path, monkeypatch):
    """A user's cache without anything, and nothing remembered."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    products.kernel.cache_clear()
    yield tmp_path
    products.kernel.cache_clear()


@contextlib.contextmanager
def two_threads():
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def matrix(lines: int, numbers: int, generator: torch.Generator, transposed: bool) -> torch.Tensor:
    """Of which rows, or with `transposed` columns, lie side by side, a little apart."""
    whole = torch.randn(lines, numbers + 3, generator=generator)[:, :numbers]
    return whole.t() if transposed else whole


@given(
    rows=st.integers(0, 40),
    columns=st.integers(1, 70),
    depth=st.one_of(st.integers(0, 40), st.sampled_from([512, 513, 1100])),
    a_transposed=st.booleans(),
    b_transposed=st.booleans(),
    gathered=st.booleans(),
    streams=st.booleans(),
    offset=st.integers(0, 16),
    seed=st.integers(0, 99),
)
@settings(deadline=None, max_examples=150)
def test_values_and_nothing_beyond(
    multiply, rows, columns, depth, a_transposed, b_transposed, gathered, streams, offset, seed
):
    generator = torch.Generator().manual_seed(seed)
    chosen: dict[str, torch.Tensor] = {}

    def factor(name: str, size: tuple[int, int], transposed: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """What is handed over, and what is meant by it."""
        if transposed or not gathered:
            made = matrix(*(size[::-1] if transposed else size), generator, transposed)
            return made, made
        source = matrix(9, size[1], generator, False)
        chosen[name] = torch.randint(9, (size[0],), generator=generator)
        return source, source[chosen[name]]

    a, meant_a = factor("a_rows", (rows, depth), a_transposed)
    b, meant_b = factor("b_rows", (depth, columns), b_transposed)
    around = torch.full((offset + (rows + 2) * (columns + 16),), 7.0)
    inside = around[offset:].view(rows + 2, columns + 16)
    out = inside[1:-1, 8 : 8 + columns]
    multiply(a, b, out, **chosen, streams=streams)
    found, expected = out.clone(), meant_a.double() @ meant_b.double()
    bound = 1e-6 * (1 + depth) ** 0.5 * (meant_a.double().abs() @ meant_b.double().abs())
    assert ((found - expected).abs() <= bound).all()
    out.fill_(7.0)
    assert (around == 7.0).all()


@pytest.mark.parametrize("depth", [5, 700])
@pytest.mark.parametrize("columns", [32, 64, 75])
def test_gelu_and_its_slope(multiply, columns, depth):
    """Of sums, and of numbers given, from far below to far above zero."""
    generator = torch.Generator().manual_seed(columns)
    a, b = torch.randn(29, depth, generator=generator), torch.randn(depth, columns, generator=generator)
    out, of_out, again, x = torch.empty(4, 29, columns)
    multiply(a, b, out, gelu=of_out, streams=True)
    plain = torch.empty_like(out)
    multiply(a, b, plain)
    assert torch.equal(out, plain)
    gelu = torch.nn.functional.gelu(out.double())
    torch.testing.assert_close(of_out.double(), gelu, rtol=1e-6, atol=1e-6)
    x.copy_(torch.linspace(-14, 14, x.numel()).view_as(x))
    wide = x.double().requires_grad_()
    multiply(a, b, out, slope_at=x, gelu=again)
    torch.nn.functional.gelu(wide).backward(plain.double())
    torch.testing.assert_close(out.double(), wide.grad, rtol=1e-6, atol=1e-6 * depth**0.5)
    torch.testing.assert_close(again.double(), torch.nn.functional.gelu(wide).detach(), rtol=1e-6, atol=1e-6)
    multiply(a, b, plain, slope_at=x)
    assert torch.equal(plain, out)


def test_gelu_of_what_is_hardly_finite(multiply):
    """An error in the numbers stays one."""
    x = torch.tensor([[float("nan"), float("inf"), -float("inf"), 3e38, -3e38, 15.0, -15.0]])
    out, found = torch.empty_like(x), torch.empty_like(x)
    multiply(torch.ones(1, 1), x, out, gelu=found)
    expected = torch.nn.functional.gelu(x.double()).float()
    torch.testing.assert_close(found, expected, equal_nan=True)
    multiply(torch.ones(1, 1), torch.ones_like(x), out, slope_at=x)
    assert out[0, :3].isnan().all() and out[0, 3:].tolist() == [1, 0, 1, 0]


def test_a_row_is_the_same_alone_and_among_others_and_with_threads(multiply):
    generator = torch.Generator().manual_seed(1)
    a, b = torch.randn(300, 600, generator=generator), torch.randn(200, 600, generator=generator).t()
    whole, apart, by_two = torch.empty(300, 200), torch.empty(300, 200), torch.empty(300, 200)
    multiply(a, b, whole)
    for first, last in itertools.pairwise((0, 1, 8, 21, 50, 300)):
        multiply(a[first:last], b, apart[first:last])
    with two_threads():
        multiply(a, b, by_two)
    assert torch.equal(whole, apart) and torch.equal(whole, by_two)


def test_threads_share_what_each_needs(multiply):
    """Room for packed numbers grows in threads that were there before."""
    generator = torch.Generator().manual_seed(1)
    with two_threads():
        for size in (64, 128, 300, 520, 100):
            a, b = (torch.randn(3 * size, size, generator=generator) for _ in range(2))
            out = torch.empty(len(a), len(b))
            multiply(a, b.t(), out)
            error = (out - a.double() @ b.double().t()).abs()
            assert (error <= 1e-6 * size**0.5 * (a.double().abs() @ b.double().abs().t())).all()


def test_other_layouts_are_refused(multiply):
    x, out = torch.randn(8, 8), torch.empty(4, 4)
    for a, b, where in (
        (x[::2, ::2], x[:4, :4], out),
        (x[:4, :4], x[::2, ::2], out),
        (x[:4, :4], x[4:, :4], x[:4, ::2]),
    ):
        with pytest.raises(AssertionError, match="side by side"):
            multiply(a, b, where)
    with pytest.raises(AssertionError, match="whole rows"):
        multiply(x[:4].t(), x[:4], torch.empty(8, 8), a_rows=torch.arange(4))


def test_torch_does_the_same(multiply):
    generator = torch.Generator().manual_seed(1)
    x, w, chosen = (
        torch.randn(9, 5, generator=generator),
        torch.randn(7, 5, generator=generator),
        torch.tensor([3, 3, 0]),
    )
    slope_at = torch.randn(3, 7, generator=generator)
    for more in ({}, {"gelu": torch.empty(3, 7)}, {"gelu": torch.empty(3, 7), "slope_at": slope_at}):
        results = []
        for product in (multiply, products.by_torch):
            out, grad = torch.empty(3, 7), torch.empty(7, 5)
            product(x, w.t(), out, a_rows=chosen, **more)
            product(out.t(), x, grad, b_rows=chosen, streams=True)
            results.append((out, grad, *(more[name].clone() for name in more)))
        for ours, torchs in zip(*results, strict=True):
            torch.testing.assert_close(ours, torchs, rtol=1e-5, atol=1e-6)
    products.by_torch(x, w.t(), out, a_rows=chosen)
    assert torch.equal(out, x[chosen] @ w.t())


def test_ours_is_for_fp32_on_cpu():
    ours = products.product_for(torch.empty(1))
    assert ours is products.kernel() and ours is not None
    for other in (
        torch.empty(1, dtype=torch.float64),
        torch.empty(1, dtype=torch.bfloat16),
        torch.empty(1, device="meta"),
    ):
        assert products.product_for(other) is products.by_torch


def test_compiled_once(fresh, monkeypatch):
    assert products.kernel() is not None
    (library,) = fresh.glob("*/*")
    products.kernel.cache_clear()
    monkeypatch.setattr(products, "compile_to", lambda *_: pytest.fail("compiled again"))
    assert products.kernel() is not None and list(fresh.glob("*/*")) == [library]


@pytest.mark.parametrize("broken", ["no-such-compiler", "false", "python"])
def test_without_a_compiler_torch_multiplies_and_says_so_once(broken, fresh, monkeypatch):
    monkeypatch.setenv("CXX", f"{sys.executable} -c 'raise SystemExit(\"no\")'" if broken == "python" else broken)
    monkeypatch.delenv("RANK", raising=False)
    with pytest.warns(
        UserWarning, match=r"torch's matrix products.*products\.cpp was not compiled \(.+\); it needs g\+\+"
    ):
        assert products.product_for(torch.empty(1)) is products.by_torch
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert products.product_for(torch.empty(1)) is products.by_torch
    assert not list(fresh.glob("*/*"))


def test_other_processors_have_torchs_without_a_word(fresh, monkeypatch):
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert products.product_for(torch.empty(1)) is products.by_torch


def test_old_processors_are_named(fresh, monkeypatch):
    monkeypatch.setattr(products, "FLAGS", (*products.FLAGS, "-mno-avx"))
    with pytest.warns(UserWarning, match="without AVX2 torch's products are faster"):
        assert products.kernel() is None


def test_without_a_folder_that_can_be_written_torch_multiplies(fresh, monkeypatch):
    (fresh / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(fresh / "file"))
    with pytest.warns(UserWarning, match=rf"{fresh}/file.*XDG_CACHE_HOME"):
        assert products.kernel() is None


def test_only_the_first_rank_warns(fresh, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("RANK", "1")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert products.kernel() is None


def test_a_broken_library_is_named(fresh, monkeypatch):
    garbage = b"\x7fELF" + random.Random(0).randbytes(60)
    monkeypatch.setattr(products, "compile_to", lambda library, flags: library.write_bytes(garbage))
    (fresh / "sparse-pretraining-recipes").mkdir()
    with pytest.warns(UserWarning, match=rf"torch's matrix products.*\({fresh}.*\.so"):
        assert products.kernel() is None
