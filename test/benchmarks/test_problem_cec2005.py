"""The CEC-2005 functions: against the report's formulas in plain loops, and their known traps."""

from __future__ import annotations

import math
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from botorch.exceptions.errors import (
    BotorchTensorDimensionError,
    InputDataError,
    UnsupportedError,
)
from botorch.test_functions.base import BaseTestProblem
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.problems.cec2005 import CEC2005
from botorch_fed.rng import generator
from botorch_fed.space import Outcome
from test.cases import uniform

FOLDER = os.environ.get("BOTORCH_FED_DATA")
HERE = FOLDER is not None and (Path(FOLDER) / "cec2005_d10.npz").is_file()
needs_data = pytest.mark.skipif(not HERE, reason="BOTORCH_FED_DATA has no cec2005_d10.npz")
ALL = range(1, 21)
SHIFTED = (1, 2, 3, 4, 6, 7, 8, 9, 10, 11, 13, 14)
LOWER = dict.fromkeys(ALL, -100.0) | dict.fromkeys((9, 10, *range(15, 21)), -5.0)
LOWER |= {7: 0.0, 8: -32.0, 11: -0.5, 12: -math.pi, 13: -3.0}
UPPER = {function: -low for function, low in LOWER.items()} | {7: 600.0, 13: 1.0}
Arrays = dict[str, NDArray[np.float64]]


def _in_range(function: int, count: int, seed: int = 0) -> Tensor:
    low, high = LOWER[function], UPPER[function]
    return low + (high - low) * uniform(count, 10, seed=seed)


# ------------------------------------------------------------------ made-up data, everywhere


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Arrays of the file's names and shapes, random but with the optimum where it must be."""
    rng = np.random.default_rng(0)
    lower, upper = np.array(list(LOWER.values())), np.array(list(UPPER.values()))
    middle, reach = (lower + upper) / 2, (upper - lower) / 2
    x_opt = middle[:, None] + 0.8 * reach[:, None] * rng.uniform(-1, 1, size=(20, 10))
    arrays: Arrays = {
        "bias": np.round(rng.normal(size=20) * 100),
        "lower": lower,
        "upper": upper,
        "f5_A": rng.normal(size=(10, 10)),
        "f5_A_lines11": rng.normal(size=(10, 10)),
        "f12_A": rng.normal(size=(10, 10)),
        "f12_B": rng.normal(size=(10, 10)),
    }
    for number in (3, 7, 8, 10, 11, 14):
        arrays[f"f{number}_M"] = np.linalg.qr(rng.normal(size=(10, 10)))[0]
    for number in (15, 16, 18, 20):
        arrays[f"f{number}_o"] = rng.uniform(-5, 5, size=(10, 10))
    x_opt[16], x_opt[18] = x_opt[15], x_opt[17]
    for number in (16, 18):
        arrays[f"f{number}_M"] = np.linalg.qr(rng.normal(size=(10, 10, 10)))[0]
    for number in (*SHIFTED, 5):
        arrays[f"f{number}_o"] = x_opt[number - 1]
    for number in (15, 16, 18, 20):
        arrays[f"f{number}_o"][0] = x_opt[number - 1]
    arrays["f12_alpha"] = x_opt[11]
    np.savez(tmp_path / "cec2005_d10.npz", x_opt=x_opt, **arrays)
    return tmp_path


@pytest.mark.parametrize("function", ALL)
def test_is_a_problem_to_be_minimised(folder: Path, function: int) -> None:
    problem = CEC2005(function, 3, data=folder)
    assert len(problem) == 3
    assert problem.dim == 10
    assert problem.space.outcome.minimize
    assert (problem.lower, problem.upper) == (LOWER[function], UPPER[function])
    assert [(p.lower, p.upper) for p in problem.space.parameters] == [
        (problem.lower, problem.upper)
    ] * 10
    assert problem.optimal_values.tolist() == [problem.bias] * 3
    assert float(problem.values(problem.x_opt)) == pytest.approx(problem.bias, rel=1e-9)
    X = uniform(2, 4, 10)
    agent = problem[2]
    assert isinstance(agent, BaseTestProblem)
    assert agent.is_minimization_problem
    assert agent.optimal_value == problem.bias
    assert torch.equal(agent.bounds, problem.bounds)
    values = agent(X, noise=False)
    assert values.shape == (2, 4)
    assert values.dtype == torch.float64
    assert torch.equal(values, problem[0](X, noise=False))  # one function for all
    assert torch.equal(values, agent.evaluate_true(X))
    assert bool((values > problem.bias).all())


def test_units(folder: Path) -> None:
    problem = CEC2005(8, data=folder)
    X = uniform(5, 10)
    rows = [list(point.values()) for point in problem.space.from_unit(X)]
    points = torch.tensor(rows, dtype=torch.float64)
    torch.testing.assert_close(
        problem.evaluate(0, X), problem.values(points), rtol=1e-12, atol=1e-12
    )
    assert problem.values(points.reshape(5, 1, 1, 10)).shape == (5, 1, 1)
    assert problem.values(points[0]).shape == ()
    assert problem.evaluate(0, X[:0]).shape == (0,)
    ends = problem.values(torch.tensor([[-32.0] * 10, [32.0] * 10]).double())
    corners = torch.stack([torch.zeros(10), torch.ones(10)]).double()
    assert torch.equal(problem.evaluate(0, corners), ends)


@pytest.mark.parametrize("function", ALL)
def test_a_point_has_the_same_value_in_every_batch(folder: Path, function: int) -> None:
    problem = CEC2005(function, data=folder)
    X = _in_range(function, 37)
    batch = problem.values(X)
    single = torch.stack([problem.values(x) for x in X])
    torch.testing.assert_close(batch, single, rtol=1e-13, atol=1e-12)
    assert torch.equal(batch.reshape(1, 37), problem.values(X.unsqueeze(0)))


@pytest.mark.parametrize(("function", "level"), [(4, 0.4), (17, 0.2)])
def test_noise(folder: Path, function: int, level: float) -> None:
    problem = CEC2005(function, data=folder)
    assert problem.noise_level == level
    x = uniform(1, 10)
    X = x.expand(4000, 10)
    agent, again, other = problem[0], problem[0], problem[1]
    true, noisy = agent(X, noise=False), agent(X)
    factor = (noisy - problem.bias) / (true - problem.bias)
    draws = (factor - 1) / level
    assert bool((draws >= 0).all())  # noise never improves a value
    # |N(0, 1)|: mean sqrt(2 / pi), second moment 1; five standard errors of 4,000 draws.
    assert float(draws.mean()) == pytest.approx(math.sqrt(2 / math.pi), abs=5 * 0.603 / 63)
    assert float(draws.square().mean()) == pytest.approx(1, abs=5 * math.sqrt(2) / 63)
    assert torch.equal(noisy, again(X))  # a function of the seed, the agent and the calls before
    assert not torch.equal(noisy, agent(X))
    assert not torch.equal(noisy, other(X))
    assert not torch.equal(noisy, CEC2005(function, data=folder, seed=1)[0](X))
    stream = generator(7, "noise")
    observed = problem.observe(0, X, stream)
    assert torch.equal(observed, problem.observe(0, X, generator(7, "noise")))
    assert not torch.equal(observed, problem.observe(0, X, stream))
    assert torch.equal(problem.evaluate(0, X), true)
    silent = CEC2005(function, data=folder, noise=False)
    assert silent.noise_level == 0
    assert torch.equal(silent[0](X), true)
    assert torch.equal(silent.observe(0, X, stream), true)
    assert repr(silent) != repr(problem)
    # There is nothing to multiply at the optimum.
    best = (problem.x_opt - problem.lower) / (problem.upper - problem.lower)
    assert float(problem[0](best.unsqueeze(0))) == pytest.approx(problem.bias, abs=1e-6)


@pytest.mark.parametrize("function", [k for k in ALL if k not in (4, 17)])
def test_all_others_are_free_of_noise(folder: Path, function: int) -> None:
    problem = CEC2005(function, data=folder)
    X = uniform(3, 10)
    assert problem.noise_level == 0
    assert torch.equal(problem[0](X), problem.evaluate(0, X))


def test_readings_of_the_fifth_function(folder: Path) -> None:
    code, report = (CEC2005(5, data=folder, f5_matrix=f) for f in ("code", "report"))  # type: ignore[arg-type]
    x = _in_range(5, 1)
    with np.load(folder / "cec2005_d10.npz") as arrays:
        o, lines, rows = arrays["f5_o"], arrays["f5_A_lines11"], arrays["f5_A"]
    for problem, A in ((code, lines), (report, rows)):
        expected = max(abs(A[i] @ (x[0].numpy() - o)) for i in range(10)) + problem.bias
        assert float(problem.values(x)) == pytest.approx(expected, rel=1e-12)
    assert repr(code) == "CEC2005(F5, f5_matrix=code, agents=10, dim=10)"
    assert repr(report) == "CEC2005(F5, f5_matrix=report, agents=10, dim=10)"


def test_scale_of_outcomes(folder: Path) -> None:
    own = Outcome(0.0, 1.0, minimize=True)
    assert CEC2005(1, data=folder, outcome=own).space.outcome == own
    with pytest.raises(UnsupportedError, match="to be minimised"):
        CEC2005(1, data=folder, outcome=Outcome(0.0, 1.0))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"function": 21}, UnsupportedError, "1 to 20, got 21"),
        ({"function": 0}, UnsupportedError, "1 to 20, got 0"),
        ({"function": True}, UnsupportedError, "1 to 20, got True"),
        ({"function": 1, "num_agents": 0}, InputDataError, "at least 1 agent, got 0"),
        ({"function": 5, "f5_matrix": "both"}, UnsupportedError, '"code" or "report", got \'both'),
    ],
)
def test_bad_arguments(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        CEC2005(**options)


def test_bad_points(folder: Path) -> None:
    problem = CEC2005(1, data=folder)
    with pytest.raises(BotorchTensorDimensionError, match=r"x 10` points, got shape \(3, 2\)"):
        problem.values(torch.zeros(3, 2).double())
    with pytest.raises(InputDataError, match="1 of 1 points lie outside the unit cube"):
        problem.evaluate(0, torch.full((1, 10), 2.0).double())
    for ask in (lambda: problem[10], lambda: problem.evaluate(10, uniform(1, 10))):
        with pytest.raises(IndexError, match=r"Agents are 0..9, got 10"):
            ask()


def test_missing_data_say_where_they_come_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("BOTORCH_FED_DATA", raising=False)
    with pytest.raises(FileNotFoundError, match=r"CEC 2005 special session.*set BOTORCH_FED_DATA"):
        CEC2005(1)
    np.savez(tmp_path / "cec2005_d10.npz", bias=np.zeros(20))
    with pytest.raises(ValueError, match=r"lacks the arrays \['f3_M', 'f3_o', 'lower'"):
        CEC2005(3, data=tmp_path)


# ------------------------------------------------------------------ the report, in plain loops


def _dot(z: list[float], M: Any) -> list[float]:
    return [sum(z[i] * M[i][j] for i in range(10)) for j in range(10)]


def _sphere(z: list[float]) -> float:
    return sum(v * v for v in z)


def _rastrigin(z: list[float]) -> float:
    return sum(v * v - 10 * math.cos(2 * math.pi * v) + 10 for v in z)


def _griewank(z: list[float]) -> float:
    product = math.prod(math.cos(v / math.sqrt(i)) for i, v in enumerate(z, start=1))
    return sum(v * v for v in z) / 4000 - product + 1


def _ackley(z: list[float]) -> float:
    a = math.sqrt(sum(v * v for v in z) / 10)
    b = sum(math.cos(2 * math.pi * v) for v in z) / 10
    return -20 * math.exp(-0.2 * a) - math.exp(b) + 20 + math.e


def _weierstrass(z: list[float]) -> float:
    def wave(v: float) -> float:
        return sum(0.5**k * math.cos(2 * math.pi * 3**k * (v + 0.5)) for k in range(21))

    return sum(wave(v) for v in z) - 10 * wave(0.0)


def _rosenbrock(a: float, b: float) -> float:
    return 100 * (a * a - b) ** 2 + (a - 1) ** 2


def _scaffer(a: float, b: float) -> float:
    r = a * a + b * b
    return 0.5 + (math.sin(math.sqrt(r)) ** 2 - 0.5) / (1 + 0.001 * r) ** 2


FIRST = (_rastrigin, _weierstrass, _griewank, _ackley, _sphere)
SECOND = (_ackley, _rastrigin, _sphere, _weierstrass, _griewank)
FIRST_LAMBDA = [1, 1, 10, 10, 5 / 60, 5 / 60, 5 / 32, 5 / 32, 5 / 100, 5 / 100]
SECOND_LAMBDA = [2 * 5 / 32, 5 / 32, 2, 1, 2 * 5 / 100, 5 / 100, 20, 10, 2 * 5 / 60, 5 / 60]
SECOND_SIGMA = [1, 2, 1.5, 1.5, 1, 1, 1.5, 1.5, 2, 2]


def _composition(
    x: list[float], basics: Any, sigma: list[float], lam: list[float], o: Any, M: Any
) -> float:
    weights, heights = [], []
    for i in range(10):
        f = basics[i // 2]
        gap = [x[j] - o[i][j] for j in range(10)]
        weights.append(math.exp(-sum(v * v for v in gap) / (2 * 10 * sigma[i] ** 2)))
        largest = abs(f(_dot([5 / lam[i]] * 10, M[i])))
        heights.append(2000 * f(_dot([v / lam[i] for v in gap], M[i])) / largest + 100 * i)
    top = max(weights)
    weights = [w if w == top else w * (1 - top**10) for w in weights]
    return sum(w * h for w, h in zip(weights, heights, strict=True)) / sum(weights)


def _slow(function: int, x: list[float], a: Any) -> float:
    """F1 to F20 without bias, one number at a time; the code's reading of F5."""
    if function == 5:
        A, o = a["f5_A_lines11"], a["f5_o"]
        return max(
            abs(sum(A[i][j] * x[j] for j in range(10)) - sum(A[i][j] * o[j] for j in range(10)))
            for i in range(10)
        )
    if function == 12:
        A, B, alpha = a["f12_A"], a["f12_B"], a["f12_alpha"]
        total = 0.0
        for i in range(10):
            there, here = (
                sum(A[i][j] * math.sin(v[j]) + B[i][j] * math.cos(v[j]) for j in range(10))
                for v in (alpha, x)
            )
            total += (there - here) ** 2
        return total
    if function >= 15:
        centres = {15: "f15_o", 16: "f16_o", 17: "f16_o", 20: "f20_o"}.get(function, "f18_o")
        if function == 15:
            return _composition(x, FIRST, [1.0] * 10, FIRST_LAMBDA, a[centres], [np.eye(10)] * 10)
        if function in (16, 17):
            return _composition(x, FIRST, [1.0] * 10, FIRST_LAMBDA, a[centres], a["f16_M"])
        sigma, lam = list(SECOND_SIGMA), list(SECOND_LAMBDA)
        if function == 19:
            sigma[0], lam[0] = 0.1, 0.1 * 5 / 32
        return _composition(x, SECOND, sigma, lam, a[centres], a["f18_M"])
    z = [x[j] - a[f"f{function}_o"][j] for j in range(10)]
    if function in (3, 7, 8, 10, 11, 14):
        z = _dot(z, a[f"f{function}_M"])
    if function in (6, 13):
        z = [v + 1 for v in z]
    if function in (2, 4):
        return sum(sum(z[: i + 1]) ** 2 for i in range(10))
    if function == 3:
        return sum(1e6 ** (i / 9) * z[i] ** 2 for i in range(10))
    if function == 6:
        return sum(_rosenbrock(z[i], z[i + 1]) for i in range(9))
    if function == 13:
        inner = [_rosenbrock(z[i], z[(i + 1) % 10]) for i in range(10)]
        return sum(t * t / 4000 - math.cos(t) + 1 for t in inner)
    if function == 14:
        return sum(_scaffer(z[i], z[(i + 1) % 10]) for i in range(10))
    basics: dict[int, Any] = {1: _sphere, 7: _griewank, 8: _ackley, 11: _weierstrass}
    return basics.get(function, _rastrigin)(z)


@pytest.mark.parametrize("function", ALL)
def test_values_are_those_of_the_formulas(folder: Path, function: int) -> None:
    _compare(CEC2005(function, data=folder), folder)


@needs_data
@pytest.mark.parametrize("function", ALL)
def test_values_on_the_real_data(function: int) -> None:
    _compare(CEC2005(function, data=FOLDER), Path(str(FOLDER)))


def _compare(problem: CEC2005, folder: Path) -> None:
    with np.load(folder / "cec2005_d10.npz") as file:
        arrays = {name: file[name].tolist() for name in file.files}
    near = problem.x_opt + 1e-3 * (problem.upper - problem.lower) * (uniform(3, 10, seed=2) - 0.5)
    X = torch.cat([_in_range(problem.function, 6, seed=1), near])
    expected = [_slow(problem.function, x, arrays) + problem.bias for x in X.tolist()]
    np.testing.assert_allclose(problem.values(X).numpy(), expected, rtol=1e-11, atol=1e-10)


# ------------------------------------------------------------------ the real data


@needs_data
@pytest.mark.parametrize("function", ALL)
def test_optimum(function: int) -> None:
    problem = CEC2005(function, data=FOLDER)
    bias = [-450, -450, -450, -450, -310, 390, -180, -140, -330, -330]
    bias += [90, -460, -130, -300, 120, 120, 120, 10, 10, 10]
    assert problem.bias == bias[function - 1]
    value = float(problem.values(problem.x_opt))
    if function < 18:
        assert value == pytest.approx(problem.bias, rel=1e-9)
    else:
        assert value == pytest.approx(problem.bias, abs=1e-10)
    inside = bool(((problem.x_opt >= problem.lower) & (problem.x_opt <= problem.upper)).all())
    assert inside == (function != 7)
    ends = (problem.x_opt == problem.lower) | (problem.x_opt == problem.upper)
    assert int(ends.sum()) == {5: 7, 8: 5, 20: 5}.get(function, 0)
    # Nothing is lower: anywhere in the range, or near the optimum.
    far = problem.evaluate(0, uniform(4096, 10))
    steps = 1e-4 * (problem.upper - problem.lower) * (uniform(512, 10) - 0.5)
    assert float(far.min()) > problem.bias
    assert float(problem.values(problem.x_opt + steps).min()) >= problem.bias
    outcome = problem.space.outcome
    public = outcome.to_public(far)
    assert abs(float(public.mean())) < 0.6  # rounded to a digit of the deviation
    assert 0.5 < float(public.std()) < 1.6


@needs_data
def test_second_function_keeps_its_last_partial_sum() -> None:
    """A popular port drops it, and is then blind to the last coordinate."""
    problem = CEC2005(2, data=FOLDER)
    x = problem.x_opt.clone()
    x[-1] += 3.0
    assert float(problem.values(x)) == pytest.approx(problem.bias + 9.0, rel=1e-12)


@needs_data
def test_rules_for_points_on_the_bounds() -> None:
    fifth, eighth, twentieth = (CEC2005(k, data=FOLDER).x_opt for k in (5, 8, 20))
    assert bool((fifth[:3] == -100).all())
    assert bool((fifth[6:] == 100).all())
    assert bool((eighth[0::2] == -32).all())
    assert bool((twentieth[1::2] == 5).all())
    # The tenth centre of F18 to F20 is the origin, of level 900: there f = bias + 900.
    for function in (18, 19, 20):
        problem = CEC2005(function, data=FOLDER)
        value = float(problem.values(torch.zeros(10).double()))
        assert value == pytest.approx(910, abs=1e-9)


@needs_data
def test_nothing_overflows_far_outside() -> None:
    for function in ALL:
        problem = CEC2005(function, data=FOLDER)
        values = problem.values(torch.full((1, 10), 1e3).double())
        assert bool(torch.isfinite(values).all())


@needs_data
def test_speed() -> None:
    problem = CEC2005(20, data=FOLDER)
    X = uniform(500, 10)
    seconds = []
    for _ in range(5):
        start = time.process_time()
        problem.evaluate(0, X)
        seconds.append(time.process_time() - start)
    assert min(seconds) < 0.02 * torch.get_num_threads()  # about 3 ms on one core
