r"""What the tables of `benchmarks.transfer_tasks` hold: models trained on real data, site by site.

A `Recipe` has the public part of a task (parameters, a user's default configuration, the number of
sites) and `scorers`, which loads the data and gives one function per site: from a configuration by
name to the site's validation score. Only `scorers` needs data; those that are not bundled with
scikit-learn lie in the folder named by ``BOTORCH_FED_DATA``.

=======================  ============================================  =============================
task                     sites                                         score
=======================  ============================================  =============================
boosting-credit          8 banks: bands of age, shares of defaults     log-loss
trees-support2           6 groups of diseases                          log-loss
mlp-digits               8 cameras: noise, classes dealt by Dirichlet  likelihood of the right class
linear-landmine          16 minefields                                 AUC
svm-har                  8 wearers, gyroscope only, activities skewed  mean AUC of pairs of classes
kernel-ridge-diabetes    5 groups by sex and body mass                 R², out of fold
tree-health              10 survey regions: age, size and prevalence   AUC
nystroem-writers         12 writers, each with another scanner         log-loss
boosting-har (held out)  8 other wearers, sitting or standing          log-loss
mlp-support2 (held out)  6 groups of diseases                          likelihood of the right class
svm-wearers              30 wearers, as svm-har                        mean AUC of pairs of classes
tree-regions             36 survey regions, as tree-health             AUC
ridge-writers            40 writers, as nystroem-writers               R² of one-hot classes
=======================  ============================================  =============================

Nothing here was chosen by looking at any optimiser's results. All randomness has a fixed seed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.problems import activity, digits, landmine, risk
from benchmarks.problems.data import load_arrays
from botorch_fed.rng import generator
from botorch_fed.space import Outcome, Parameter, SearchSpace
from botorch_fed.test_functions.sklearn_tuning import deal_rows

Matrix = NDArray[np.float64]
Labels = NDArray[np.intp]
Rows = NDArray[np.intp]
Scorer = Callable[..., float]
Halves = tuple[Matrix, Labels, Matrix, Labels]  # training rows and classes, validation ones

LOSS = Outcome(minimize=True)
SCORE = Outcome()


@dataclass(frozen=True)
class Recipe:
    """A tuning task before its table.

    Attributes:
        parameters: What is tuned, in the user's units.
        outcome: Whether scores are to be minimised.
        default: What a user would try first: the library's defaults, as far as the ranges go.
        sites: How many.
        scorers: Loads the data and gives one function per site.
    """

    parameters: tuple[Parameter, ...]
    outcome: Outcome
    default: Mapping[str, float | int]
    sites: int
    scorers: Callable[[], Sequence[Scorer]]

    @property
    def space(self) -> SearchSpace:
        return SearchSpace(self.parameters, self.outcome)


# ------------------------------------------------------------------ scores


def log_loss(P: Matrix, y: Labels) -> float:
    """Mean negative log of the probabilities of the right classes; none counts as below 1e-6."""
    return float(-np.log(np.clip(P[np.arange(len(y)), y], 1e-6, 1.0)).mean())


def auc(scores: Matrix, positive: NDArray[np.bool_]) -> float:
    """How often a positive row scores above a negative one, ties counted as half."""
    low = np.sort(scores[~positive])
    below = np.searchsorted(low, scores[positive], "left")
    up_to = np.searchsorted(low, scores[positive], "right")
    return float((below + up_to).mean() / (2 * len(low)))


# ------------------------------------------------------------------ rows


def shuffled(rows: Rows, *path: int | str) -> Rows:
    """The rows in an order fixed by the path."""
    order: Rows = rows[generator(0, "transfer", *path).uniform(len(rows)).argsort().numpy()]
    return order


def split(
    X: Matrix, y: Labels, rows: Rows, train: int | float, seed: int, most: int | None = None
) -> Halves:
    """Stratified training and validation rows; `most` validation rows at most."""
    from sklearn.model_selection import train_test_split

    a, b = train_test_split(rows, train_size=train, stratify=y[rows], random_state=seed)
    b = b[:most]
    return X[a], y[a], X[b], y[b]


def banded(
    key: Matrix, y: Labels, sizes: list[int], rates: list[float], name: str, width: float = 1.0
) -> list[Rows]:
    """Disjoint rows of sites: overlapping bands of a key, each with its own share of positives."""
    sites = len(sizes)
    rank = key.argsort(kind="stable").argsort() / len(key)
    free = np.ones(len(key), dtype=bool)
    hands = []
    for site, (size, rate) in enumerate(zip(sizes, rates, strict=True)):
        inside = free & (np.abs(rank - (site + 0.5) / sites) < width / sites)
        ones = round(size * rate)
        parts = []
        for label, count in ((1, ones), (0, size - ones)):
            members = np.flatnonzero(inside & (y == label))
            if len(members) < count:
                raise ValueError(f"{name}: site {site} lacks rows of class {label}.")
            parts.append(shuffled(members, name, site, label)[:count])
        hand = np.concatenate(parts)
        free[hand] = False
        hands.append(np.sort(hand))
    return hands


def averaged(score: Scorer, halves: list[Halves], **settings: Any) -> float:
    """The mean score over a site's splits."""
    return float(np.mean([score(half, **settings) for half in halves]))


# ------------------------------------------------------------------ 1 boosting-credit

BOOSTING = (
    Parameter.real("learning_rate", 0.01, 1.0, scale="log"),
    Parameter.integer("n_estimators", 5, 100, scale="log"),
    Parameter.integer("max_depth", 1, 8),
    Parameter.real("subsample", 0.3, 1.0),
    Parameter.integer("min_samples_leaf", 1, 40, scale="log"),
    Parameter.real("max_features", 0.1, 1.0),
)
BOOSTING_DEFAULT = {
    "learning_rate": 0.1,
    "n_estimators": 100,
    "max_depth": 3,
    "subsample": 1.0,
    "min_samples_leaf": 1,
    "max_features": 1.0,
}


def boosting(half: Halves, **settings: Any) -> float:
    """Log-loss of gradient boosting."""
    from sklearn.ensemble import GradientBoostingClassifier

    A, a, B, b = half
    model = GradientBoostingClassifier(random_state=0, **settings).fit(A, a)
    return log_loss(model.predict_proba(B), b)


def credit_sites() -> Sequence[Scorer]:
    arrays = load_arrays("credit_default.npz", ("X", "y"), folder=None, origin=risk.CREDIT_ORIGIN)
    X, y = arrays["X"].astype(np.float64), arrays["y"].astype(np.intp)
    rates = [0.12, 0.3, 0.18, 0.4, 0.22, 0.1, 0.35, 0.25]
    train = [100, 130, 160, 190, 220, 120, 150, 200]
    key = X[:, 4] + generator(0, "transfer", "credit").uniform(len(X)).numpy()  # age
    hands = banded(key, y, [n + 600 for n in train], rates, "credit")
    return [
        partial(averaged, boosting, [split(X, y, rows, n, 0)])
        for rows, n in zip(hands, train, strict=True)
    ]


# ------------------------------------------------------------------ 2 trees-support2


def trees(half: Halves, **settings: Any) -> float:
    """Log-loss of 30 extremely randomised trees."""
    from sklearn.ensemble import ExtraTreesClassifier

    A, a, B, b = half
    model = ExtraTreesClassifier(30, bootstrap=True, random_state=0, **settings).fit(A, a)
    return log_loss(model.predict_proba(B), b)


def support_rows() -> tuple[Matrix, Labels, list[Rows]]:
    """Patients, who died in hospital, and six groups of diseases."""
    names = ("X", "y", "columns", *(f"levels_{name}" for name in risk.NOMINAL))
    arrays = load_arrays("support2.npz", names, folder=None, origin=risk.SUPPORT_ORIGIN)
    raw, columns = arrays["X"].astype(np.float64), arrays["columns"].tolist()
    levels = {name: len(arrays[f"levels_{name}"]) for name in risk.NOMINAL}
    disease = raw[:, columns.index("dzgroup")]
    groups = ([0], [1, 2], [3], [4, 6], [5], [7])  # cancers together, heart and lung together
    hands = [np.flatnonzero(np.isin(disease, group)) for group in groups]
    hands = [np.sort(shuffled(rows, "support", site)[:700]) for site, rows in enumerate(hands)]
    return risk._support_columns(raw, columns, levels), arrays["y"].astype(np.intp), hands


def support_halves() -> list[list[Halves]]:
    X, y, hands = support_rows()
    sites = []
    for rows in hands:
        A, a, B, b = split(X, y, rows, min(200, len(rows) // 2), 0)
        A, B = risk._standardized(A, B)
        sites.append([(A, a, B, b)])
    return sites


def support_sites() -> Sequence[Scorer]:
    return [partial(averaged, trees, halves) for halves in support_halves()]


# ------------------------------------------------------------------ 3 mlp-digits

MLP = (
    Parameter.real("learning_rate", 1e-3, 1.0, scale="log"),
    Parameter.real("alpha", 1e-6, 1e-1, scale="log"),
    Parameter.integer("hidden", 4, 100, scale="log"),
    Parameter.integer("batch_size", 4, 64, scale="log"),
    Parameter.real("momentum", 0.0, 0.98),
    Parameter.integer("epochs", 2, 30),
)
MLP_DEFAULT = {
    "learning_rate": 0.01,
    "alpha": 1e-4,
    "hidden": 100,
    "batch_size": 32,
    "momentum": 0.9,
    "epochs": 10,
}


def mlp(half: Halves, **settings: Any) -> float:
    """Geometric mean of the probabilities that a small network gives to the right classes."""
    A, a, B, b = half
    with np.errstate(all="ignore"):
        P = network(A, np.eye(a.max() + 1)[a], B, **settings)
    if not np.isfinite(P).all():
        return 0.0
    return float(np.exp(-log_loss(P, b)))


def network(
    A: Matrix,
    T: Matrix,
    B: Matrix,
    *,
    learning_rate: float,
    alpha: float,
    hidden: int,
    batch_size: int,
    momentum: float,
    epochs: int,
) -> Matrix:
    """Probabilities of the classes of `B`, from one hidden layer trained by gradient steps."""
    n, d = A.shape
    draws = generator(0, "transfer", "weights", d)
    W = [
        draws.normal(MLP_DEFAULT["hidden"], d).numpy()[:hidden].T * np.sqrt(2 / d),
        draws.normal(MLP_DEFAULT["hidden"], T.shape[1]).numpy()[:hidden] * np.sqrt(1 / hidden),
    ]
    bias = [np.zeros(hidden), np.zeros(T.shape[1])]
    speed = [np.zeros_like(part) for part in (*W, *bias)]
    order = [
        generator(0, "transfer", "order", e).uniform(n).argsort().numpy() for e in range(epochs)
    ]
    size = min(batch_size, n)
    for epoch in order:
        for start in range(0, n - size + 1, size):
            rows = epoch[start : start + size]
            H = np.maximum(A[rows] @ W[0] + bias[0], 0)
            slope = (softmax(H @ W[1] + bias[1]) - T[rows]) / size
            back = (slope @ W[1].T) * (H > 0)
            steps = (
                A[rows].T @ back + alpha * W[0],
                H.T @ slope + alpha * W[1],
                back.sum(axis=0),
                slope.sum(axis=0),
            )
            for part, moving, step in zip((*W, *bias), speed, steps, strict=True):
                moving *= momentum
                moving -= learning_rate * step
                part += moving
    return softmax(np.maximum(B @ W[0] + bias[0], 0) @ W[1] + bias[1])


def softmax(Z: Matrix) -> Matrix:
    E: Matrix = np.exp(Z - Z.max(axis=-1, keepdims=True))
    return E / E.sum(axis=-1, keepdims=True)


def digit_sites() -> Sequence[Scorer]:
    from sklearn.datasets import load_digits

    X, y = load_digits(return_X_y=True)
    scorers: list[Scorer] = []
    for site, rows in enumerate(deal_rows(y, 8, "label", 0.2, 0)):
        noise = generator(0, "transfer", "digits", site).normal(*X.shape).numpy()
        seen = X / 16 + site / 12 * noise  # worse and worse cameras
        halves = [split(seen, y, rows, 0.5, seed) for seed in range(2)]
        scorers.append(partial(averaged, mlp, halves))
    return scorers


# ------------------------------------------------------------------ 4 linear-landmine


def linear(
    half: Halves,
    *,
    alpha: float,
    l1_ratio: float,
    eta0: float,
    epochs: int,
    positive_weight: float,
) -> float:
    """AUC of a logistic regression, trained by gradient steps on inputs and their products."""
    from sklearn.linear_model import SGDClassifier

    A, a, B, b = half
    model = SGDClassifier(
        loss="log_loss",
        penalty="elasticnet",
        alpha=alpha,
        l1_ratio=l1_ratio,
        learning_rate="invscaling",
        eta0=eta0,
        power_t=0.25,
        max_iter=epochs,
        tol=None,
        class_weight={1: positive_weight},
        random_state=0,
    ).fit(A, a)
    return auc(model.decision_function(B), b == 1)


def products(X: Matrix) -> Matrix:
    """Inputs, their squares and products."""
    i, j = np.triu_indices(X.shape[1])
    return np.concatenate([X, X[:, i] * X[:, j]], axis=1)


def landmine_sites() -> Sequence[Scorer]:
    names = ("X", "y", "field")
    arrays = load_arrays("landmine.npz", names, folder=None, origin=landmine.ORIGIN)
    X, y = arrays["X"].astype(np.float64), arrays["y"].astype(np.intp)
    scorers: list[Scorer] = []
    for field in (*range(8), *range(15, 23)):  # of the two kinds of ground
        rows = np.flatnonzero(arrays["field"] == field)
        halves = []
        for seed in range(4):
            A, a, B, b = split(X, y, rows, 0.5, seed)
            halves.append((*_scaled(products(A), products(B)), a, b))
        scorers.append(partial(averaged, linear, [(A, a, B, b) for A, B, a, b in halves]))
    return scorers


def _scaled(A: Matrix, B: Matrix) -> tuple[Matrix, Matrix]:
    centre, spread = A.mean(axis=0), A.std(axis=0)
    spread[spread == 0] = 1.0
    return (A - centre) / spread, (B - centre) / spread


# ------------------------------------------------------------------ 5 svm-har


def svm(half: Halves, *, C: float, gamma: float, components: int, weight_power: float) -> float:
    """Mean AUC over pairs of classes of an RBF machine; gamma is relative to the inputs' spread."""
    from sklearn.svm import SVC

    A, a, B, b = half
    A, B = A[:, :components], B[:, :components]
    counts = np.bincount(a)
    weights = {c: (len(a) / (len(counts) * n)) ** weight_power for c, n in enumerate(counts)}
    machine = SVC(C=C, gamma=gamma / A.var(axis=0).sum(), class_weight=weights, tol=1e-4)
    machine.set_params(decision_function_shape="ovo", max_iter=20_000)
    D = machine.fit(A, a).decision_function(B)
    pairs = zip(*np.triu_indices(len(counts), 1), strict=True)
    scores = []
    for column, (i, j) in enumerate(pairs):
        rows = (b == i) | (b == j)
        scores.append(auc(D[rows, column], b[rows] == i))
    return float(np.mean(scores))


def har_rows() -> tuple[Matrix, Labels, Labels]:
    """The gyroscope's features, activities and wearers."""
    names = ("X", "y", "subject", "feature_names", "feature_fidelity")
    arrays = load_arrays("har.npz", names, folder=None, origin=activity.ORIGIN)
    kept = np.char.find(arrays["feature_names"], "BodyGyro-") >= 0
    kept &= arrays["feature_fidelity"] < 2
    X = arrays["X"].astype(np.float64)[:, kept]
    return X, arrays["y"].astype(np.intp), arrays["subject"].astype(np.intp)


def har_sites() -> Sequence[Scorer]:
    return wearers(8)


def wearers(count: int) -> Sequence[Scorer]:
    """The first wearers, one site each."""
    X, y, subject = har_rows()
    names = range(1, count + 1)
    return [partial(averaged, svm, [har_half(X, y, subject, name)]) for name in names]


def har_half(X: Matrix, y: Labels, subject: Labels, name: int) -> Halves:
    """A wearer's principal components: a few windows of each activity train, the rest validate."""
    shares = generator(0, "transfer", "har", name).uniform(6).numpy()
    train = []
    for label in range(6):
        rows = shuffled(np.flatnonzero((subject == name) & (y == label)), "har", name, label)
        train.append(rows[: 3 + round(17 * shares[label] ** 2)])
    a = np.concatenate(train)
    b = np.setdiff1d(np.flatnonzero(subject == name), a)
    A, B = _scaled(X[a], X[b])
    axes = np.linalg.svd(A, full_matrices=False)[2][:60]
    return A @ axes.T, y[a], B @ axes.T, y[b]


# ------------------------------------------------------------------ 6 kernel-ridge-diabetes


def kernel_ridge(
    folds: list[tuple[Matrix, Matrix, Matrix, Matrix]],
    *,
    alpha: float,
    gamma: float,
    mix: float,
    components: int,
) -> float:
    """R² out of fold of ridge regression with a mixture of RBF (0) and Laplacian (1) kernels."""
    errors = total = 0.0
    for A, a, B, b in folds:
        A, B = A[:, :components], B[:, :components]
        centre = a.mean()
        gram = mixed_kernel(A, A, gamma, mix) + alpha * np.eye(len(A))
        guess = centre + mixed_kernel(B, A, gamma, mix) @ np.linalg.solve(gram, a - centre)
        errors += float(((b - guess) ** 2).sum())
        total += float(((b - centre) ** 2).sum())
    return 1 - errors / total


def mixed_kernel(A: Matrix, B: Matrix, gamma: float, mix: float) -> Matrix:
    gaps = A[:, None, :] - B[None, :, :]
    smooth = np.exp(-gamma * (gaps**2).sum(axis=-1))
    return (1 - mix) * smooth + mix * np.exp(-gamma * np.abs(gaps).sum(axis=-1))


def diabetes_sites() -> Sequence[Scorer]:
    from sklearn.datasets import load_diabetes

    X, y = load_diabetes(return_X_y=True)
    sexes = [np.flatnonzero(X[:, 1] < 0), np.flatnonzero(X[:, 1] > 0)]
    groups = []
    for rows, parts in zip(sexes, (3, 2), strict=True):  # by body mass
        groups += np.array_split(rows[X[rows, 2].argsort(kind="stable")], parts)
    return [partial(kernel_ridge, diabetes_folds(X, y, rows)) for rows in groups]


def diabetes_folds(X: Matrix, y: Matrix, rows: Rows) -> list[tuple[Matrix, Matrix, Matrix, Matrix]]:
    rows = shuffled(rows, "diabetes")
    folds = []
    for test in np.array_split(rows, 5):
        train = np.setdiff1d(rows, test)
        A, B = _scaled(X[train], X[test])
        axes = np.linalg.svd(A, full_matrices=False)[2]
        folds.append((A @ axes.T, y[train], B @ axes.T, y[test]))
    return folds


# ------------------------------------------------------------------ 7 tree-health


def tree(half: Halves, **settings: Any) -> float:
    """AUC of one decision tree."""
    from sklearn.tree import DecisionTreeClassifier

    A, a, B, b = half
    model = DecisionTreeClassifier(random_state=0, **settings).fit(A, a)
    return auc(model.predict_proba(B)[:, 1], b == 1)


def health_sites() -> Sequence[Scorer]:
    train = [round(80 * 1.32**k) for k in (3, 8, 0, 5, 9, 1, 6, 4, 7, 2)]  # 80 to 973
    rates = [0.3, 0.5, 0.4, 0.25, 0.55, 0.35, 0.45, 0.6, 0.3, 0.5]
    return regions("health", train, rates, splits=4)


def region_sites() -> Sequence[Scorer]:
    draws = generator(0, "transfer", "regions").uniform(2, 36).tolist()
    train = [round(80 * 10**u) for u in draws[0]]
    rates = [0.25 + 0.35 * u for u in draws[1]]
    return regions("regions", train, rates, splits=2, width=4.0)


def regions(
    name: str, train: list[int], rates: list[float], splits: int, width: float = 1.0
) -> Sequence[Scorer]:
    """Survey regions with so many rows for training and 500 to validate, by age."""
    names = ("X_balanced", "y_balanced")
    arrays = load_arrays("diabetes_health.npz", names, folder=None, origin=risk.DIABETES_ORIGIN)
    X, y = arrays["X_balanced"].astype(np.float64), arrays["y_balanced"].astype(np.intp)
    key = X[:, 18] + generator(0, "transfer", name).uniform(len(X)).numpy()  # age
    hands = banded(key, y, [n + 500 for n in train], rates, name, width)
    return [
        partial(averaged, tree, [split(X, y, rows, n, seed) for seed in range(splits)])
        for rows, n in zip(hands, train, strict=True)
    ]


# ------------------------------------------------------------------ 8 nystroem-writers


def nystroem(
    half: Halves, *, gamma: float, components: int, C: float, blur: float, contrast: float
) -> float:
    """Log-loss of a logistic regression on Nyström's features of blurred digits."""
    from sklearn.kernel_approximation import Nystroem
    from sklearn.linear_model import LogisticRegression

    A, a, B, b = half
    A, B = (blurred(part, blur, contrast) for part in (A, B))
    features = Nystroem(gamma=gamma, n_components=min(components, len(A)), random_state=0).fit(A)
    model = LogisticRegression(C=C, tol=1e-3, max_iter=60).fit(features.transform(A), a)
    return log_loss(model.predict_proba(features.transform(B)), b)


def blurred(images: Matrix, blur: float, contrast: float) -> Matrix:
    """Images as rows."""
    from scipy.ndimage import gaussian_filter

    rows: Matrix = (gaussian_filter(images, (0, blur, blur)) ** contrast).reshape(len(images), -1)
    return rows


def one_hot_ridge(
    half: Halves, *, gamma: float, alpha: float, blur: float, contrast: float
) -> float:
    """R² of kernel ridge regression to the classes of blurred digits, one column each."""
    A, a, B, b = half
    A, B = (blurred(part, blur, contrast) for part in (A, B))
    T, V = (np.eye(a.max() + 1)[labels] for labels in (a, b))
    centre = T.mean(axis=0)
    squares = (A**2).sum(axis=1)
    among = np.exp(-gamma * (squares[:, None] + squares - 2 * A @ A.T))
    across = np.exp(-gamma * ((B**2).sum(axis=1)[:, None] + squares - 2 * B @ A.T))
    gram = among + alpha * np.eye(len(A))
    guess = centre + across @ np.linalg.solve(gram, T - centre)
    return float(1 - ((V - guess) ** 2).sum() / ((V - centre) ** 2).sum())


def writer_sites() -> Sequence[Scorer]:
    return writers(12, nystroem)


def writers(count: int, score: Scorer) -> Sequence[Scorer]:
    """Those who have written most, one site each."""
    names = ("X", "y", "writer")
    arrays = load_arrays("mnist_by_writer.npz", names, folder=None, origin=digits.ORIGIN)
    writer = arrays["writer"].astype(np.intp)
    X = arrays["X"].astype(np.float64).reshape(-1, 14, 2, 14, 2).mean(axis=(2, 4)) / 255
    y = arrays["y"].astype(np.intp)
    most = np.argsort(-np.bincount(writer), kind="stable")[:count]
    scorers: list[Scorer] = []
    for site, name in enumerate(np.sort(most)):
        rows = np.flatnonzero(writer == name)
        scorers.append(partial(averaged, score, [writer_half(scanned(X, site), y, rows)]))
    return scorers


def scanned(X: Matrix, site: int) -> Matrix:
    """Images in [0, 1] as a site's scanner sees them: its own gamma curve, background and noise."""
    draws = generator(0, "transfer", "scanner", site)
    curve, ground, noise = draws.uniform(3).tolist()
    seen = 0.3 * ground + (1 - 0.3 * ground) * X ** (0.4 * 6.0**curve)
    return np.clip(seen + 0.4 * noise * draws.normal(*X.shape).numpy(), 0.0, 1.0)


def writer_half(X: Matrix, y: Labels, rows: Rows) -> Halves:
    """Digits that a writer has at least four of, with classes counted from zero."""
    counts = np.bincount(y[rows], minlength=10)
    rows = rows[counts[y[rows]] >= 4]
    classes = np.zeros(len(y), dtype=np.intp)
    classes[rows] = np.unique(y[rows], return_inverse=True)[1]
    return split(X, classes, rows, 0.6, 0)


# ------------------------------------------------------------------ held out


def posture_sites() -> Sequence[Scorer]:
    """Sitting or standing, of wearers that svm-har does not have."""
    X, y, subject = har_rows()
    scorers: list[Scorer] = []
    for site, name in enumerate(range(23, 31)):
        shares = generator(0, "transfer", "posture", name).uniform(2).numpy()
        counts = np.rint(15 + 20 * shares).astype(int)
        train = np.concatenate(
            [
                shuffled(np.flatnonzero((subject == name) & (y == label)), "posture", name)[:count]
                for label, count in zip((3, 4), counts, strict=True)
            ]
        )
        rows = np.flatnonzero((subject == name) & ((y == 3) | (y == 4)))
        test = np.setdiff1d(rows, train)
        noise = generator(0, "transfer", "posture", site).normal(*X.shape).numpy()
        seen = X + 0.05 * site * noise  # older and older devices
        half = (seen[train], y[train] - 3, seen[test], y[test] - 3)
        scorers.append(partial(averaged, boosting, [half]))
    return scorers


def support_mlp_sites() -> Sequence[Scorer]:
    return [partial(averaged, mlp, halves) for halves in support_halves()]


# ------------------------------------------------------------------ the recipes

SVM = (
    Parameter.real("C", 1e-2, 1e3, scale="log"),
    Parameter.real("gamma", 1e-2, 1e2, scale="log"),
    Parameter.integer("components", 2, 60, scale="log"),
    Parameter.real("weight_power", 0.0, 2.0),
)
SVM_DEFAULT = {"C": 1.0, "gamma": 1.0, "components": 60, "weight_power": 0.0}
TREE = (
    Parameter.integer("max_depth", 1, 20),
    Parameter.integer("min_samples_leaf", 1, 60, scale="log"),
    Parameter.integer("min_samples_split", 2, 120, scale="log"),
    Parameter.real("ccp_alpha", 1e-5, 3e-2, scale="log"),
    Parameter.real("min_impurity_decrease", 1e-6, 1e-2, scale="log"),
    Parameter.real("max_features", 0.05, 1.0),
)
TREE_DEFAULT = {
    "max_depth": 20,
    "min_samples_leaf": 1,
    "min_samples_split": 2,
    "ccp_alpha": 1e-5,
    "min_impurity_decrease": 1e-6,
    "max_features": 1.0,
}

RECIPES: dict[str, Recipe] = {
    "boosting-credit": Recipe(BOOSTING, LOSS, BOOSTING_DEFAULT, 8, credit_sites),
    "trees-support2": Recipe(
        (
            Parameter.integer("max_depth", 2, 20),
            Parameter.integer("min_samples_leaf", 1, 40, scale="log"),
            Parameter.real("max_features", 0.05, 1.0),
            Parameter.real("max_samples", 0.1, 1.0),
            Parameter.real("ccp_alpha", 1e-5, 1e-1, scale="log"),
        ),
        LOSS,
        {
            "max_depth": 20,
            "min_samples_leaf": 1,
            "max_features": 0.15,
            "max_samples": 1.0,
            "ccp_alpha": 1e-5,
        },
        6,
        support_sites,
    ),
    "mlp-digits": Recipe(MLP, SCORE, MLP_DEFAULT, 8, digit_sites),
    "linear-landmine": Recipe(
        (
            Parameter.real("alpha", 1e-6, 0.1, scale="log"),
            Parameter.real("l1_ratio", 0.0, 1.0),
            Parameter.real("eta0", 1e-4, 1.0, scale="log"),
            Parameter.integer("epochs", 1, 30, scale="log"),
            Parameter.real("positive_weight", 0.3, 30.0, scale="log"),
        ),
        SCORE,
        {"alpha": 1e-4, "l1_ratio": 0.15, "eta0": 0.01, "epochs": 30, "positive_weight": 1.0},
        16,
        landmine_sites,
    ),
    "svm-har": Recipe(SVM, SCORE, SVM_DEFAULT, 8, har_sites),
    "kernel-ridge-diabetes": Recipe(
        (
            Parameter.real("alpha", 1e-2, 1e2, scale="log"),
            Parameter.real("gamma", 1e-3, 10.0, scale="log"),
            Parameter.real("mix", 0.0, 1.0),
            Parameter.integer("components", 1, 10),
        ),
        SCORE,
        {"alpha": 1.0, "gamma": 0.1, "mix": 0.0, "components": 10},
        5,
        diabetes_sites,
    ),
    "tree-health": Recipe(TREE, SCORE, TREE_DEFAULT, 10, health_sites),
    "nystroem-writers": Recipe(
        (
            Parameter.real("gamma", 1e-3, 1.0, scale="log"),
            Parameter.integer("components", 5, 60, scale="log"),
            Parameter.real("C", 0.1, 1e4, scale="log"),
            Parameter.real("blur", 0.0, 2.0),
            Parameter.real("contrast", 0.3, 3.0, scale="log"),
        ),
        LOSS,
        {"gamma": 1 / 196, "components": 60, "C": 1.0, "blur": 0.0, "contrast": 1.0},
        12,
        writer_sites,
    ),
    "boosting-har": Recipe(BOOSTING, LOSS, BOOSTING_DEFAULT, 8, posture_sites),
    "mlp-support2": Recipe(MLP, SCORE, MLP_DEFAULT, 6, support_mlp_sites),
    "svm-wearers": Recipe(SVM, SCORE, SVM_DEFAULT, 30, partial(wearers, 30)),
    "tree-regions": Recipe(TREE, SCORE, TREE_DEFAULT, 36, region_sites),
    "ridge-writers": Recipe(
        (
            Parameter.real("gamma", 1e-3, 1.0, scale="log"),
            Parameter.real("alpha", 1e-4, 10.0, scale="log"),
            Parameter.real("blur", 0.0, 2.0),
            Parameter.real("contrast", 0.3, 3.0, scale="log"),
        ),
        SCORE,
        {"gamma": 1 / 196, "alpha": 1.0, "blur": 0.0, "contrast": 1.0},
        40,
        partial(writers, 40, one_hot_ridge),
    ),
}
