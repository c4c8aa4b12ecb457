"""Coverage and width of the 95 % intervals of an evaluation and of a paired difference, by simulation.

    python benchmarks/interval_coverage.py        # writes benchmarks/results/coverage.md: 2 minutes of CPU time

A cell is a number of problems, a number of samples per problem, a mean difficulty and a spread of difficulty. In each
draw, every problem gets a chance of success: the mean itself (homogeneous problems), or a Beta-distributed number with
this mean and the given correlation of two samples of one problem. The samples are binomial. Coverage is the share of
draws whose interval holds the true mean. A cell has 1,000 draws, so that the standard error of a coverage of 95 % is
0.7 points. Cells below 94.5 % are measured again with 10,000 fresh draws (0.2 points), and only the second result
counts.

"Now" is `mean_share` and `paired_difference`. "Before" are the methods that they replaced, which are computed here:
Wilson's score interval with p (1 - p) / v trials, where v is the variance of the mean between problems, and for
differences the interval of Agresti and Min.

For paired differences the second policy has, on each problem, the chance of the first one ("same"), a chance drawn anew
("redrawn"), or a chance that is 40 % of the way nearer to 1 ("better").
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from grpo_recipes.evaluation.estimates import Estimate, Z, mean_share, paired_difference
from grpo_recipes.runs.files import write_atomically

RESULTS = Path(__file__).parent / "results" / "coverage.md"
PROBLEMS = (5, 10, 20, 50, 100, 400)
SAMPLES = (1, 4, 16, 64)
MEANS = (0.5, 0.1, 0.02)
CORRELATIONS = (0.0, 0.1, 0.3, 0.7)
PAIRED_SAMPLES = (1, 8, 64)
PAIRED_CORRELATIONS = (0.0, 0.3)
SECOND_POLICIES = ("same", "redrawn", "better")
DRAWS, MORE_DRAWS = 1_000, 10_000
AGAIN_BELOW = 0.945
NEARER = 0.4
"""Part of the way to 1 by which the second policy is better."""
MASTERED = 0.05
"""Share of the problems that the second policy masters, in the table of limits."""


@dataclass(frozen=True)
class Cell:
    """One cell of a grid."""

    problems: int
    samples: int
    mean: float
    correlation: float
    """Correlation of two samples of one problem. 0 for homogeneous problems."""
    second: str = ""
    """Second policy of a paired difference, or empty for a mean."""


@dataclass(frozen=True)
class Measured:
    """Coverage and mean width of both methods in a cell."""

    cell: Cell
    coverage_before: float
    coverage: float
    width_before: float
    width: float
    draws: int


Ends = tuple[np.ndarray, np.ndarray]


def chances(cell: Cell, draws: int, generator: np.random.Generator) -> np.ndarray:
    """Return the chance of success of each problem in each draw, (draws, problems)."""
    shape = (draws, cell.problems)
    if cell.correlation == 0:
        return np.full(shape, cell.mean)
    size = (1 - cell.correlation) / cell.correlation
    return generator.beta(cell.mean * size, (1 - cell.mean) * size, shape)


def second_chances(cell: Cell, first: np.ndarray, generator: np.random.Generator) -> tuple[np.ndarray, float]:
    """Return the chances of the second policy, and the true mean difference."""
    if cell.second == "same":
        return first, 0.0
    if cell.second == "redrawn":
        return chances(cell, len(first), generator), 0.0
    if cell.second == "better":
        return first + NEARER * (1 - first), NEARER * (1 - cell.mean)
    is_mastered = generator.random(first.shape) < MASTERED
    return np.where(is_mastered, 1.0, first), MASTERED * (1 - cell.mean)


def score_interval(shares: np.ndarray) -> Ends:
    """Return Wilson's interval with p (1 - p) / v trials, for each row of (draws, problems)."""
    mean, problems = shares.mean(1), shares.shape[1]
    variance = shares.var(1) / problems
    n = np.where(variance > 1e-15, mean * (1 - mean) / np.maximum(variance, 1e-300), problems)
    centre = (mean + Z**2 / (2 * n)) / (1 + Z**2 / n)
    half_width = Z * np.sqrt(mean * (1 - mean) / n + Z**2 / (4 * n * n)) / (1 + Z**2 / n)
    return np.minimum(mean, centre - half_width), np.maximum(mean, centre + half_width)


def agresti_min(differences: np.ndarray) -> Ends:
    """Return Agresti and Min's interval for each row of (draws, problems)."""
    n = differences.shape[1] + 2
    centre = differences.sum(1) / n
    half_width = Z * np.sqrt(((differences**2).sum(1) + 1) / n - centre**2) / np.sqrt(n)
    return np.maximum(-1, centre - half_width), np.minimum(1, centre + half_width)


def intervals(rows: np.ndarray, estimate: Callable[[np.ndarray], Estimate]) -> Ends:
    """Return the interval of each row. A row whose sorted values are known is not computed again."""
    known: dict[bytes, Estimate] = {}
    ends = []
    for row in np.sort(rows, axis=1):
        key = row.tobytes()
        if key not in known:
            known[key] = estimate(row)
        ends.append((known[key].low, known[key].high))
    low, high = np.array(ends).T
    return low, high


def drawn(cell: Cell, draws: int, generator: np.random.Generator) -> tuple[Ends, Ends, float]:
    """Return the intervals of both methods in each draw, before and now, and the true value."""
    first_chances = chances(cell, draws, generator)
    first = generator.binomial(cell.samples, first_chances) / cell.samples
    if not cell.second:
        completions = cell.problems * cell.samples
        now = intervals(first, lambda shares: mean_share(shares.tolist(), completions))
        return score_interval(first), now, cell.mean
    following, truth = second_chances(cell, first_chances, generator)
    differences = generator.binomial(cell.samples, following) / cell.samples - first
    # Only the differences matter, and both policies' shares lie in [0, 1].
    zeros = [0.0] * cell.problems
    now = intervals(differences, lambda gains: paired_difference(zeros, gains.tolist()))
    return agresti_min(differences), now, truth


def measure(cell: Cell, draws: int, generator: np.random.Generator) -> Measured:
    """Return coverage and widths of a cell from some draws."""
    before, now, truth = drawn(cell, draws, generator)
    figures = []
    for low, high in (before, now):
        holds = (low <= truth + 1e-12) & (truth - 1e-12 <= high)
        figures.append((float(holds.mean()), float((high - low).mean())))
    (coverage_before, width_before), (coverage, width) = figures
    return Measured(cell, coverage_before, coverage, width_before, width, draws)


def grid() -> tuple[list[Cell], list[Cell]]:
    """Return the cells of means, and those of paired differences."""
    means = []
    for problems, samples, mean in itertools.product(PROBLEMS, SAMPLES, MEANS):
        # The spread of difficulty does not matter to one sample per problem.
        spreads = CORRELATIONS if samples > 1 else (0.0,)
        means += [Cell(problems, samples, mean, spread) for spread in spreads]
    paired = []
    for problems, samples in itertools.product(PROBLEMS, PAIRED_SAMPLES):
        for mean, spread, second in itertools.product(MEANS, PAIRED_CORRELATIONS, SECOND_POLICIES):
            paired.append(Cell(problems, samples, mean, spread, second))
    return means, paired


def limits() -> list[Cell]:
    """Return cells in which the second policy masters a few problems that look like the others."""
    return [Cell(problems, 64, 0.02, 0.0, "mastered") for problems in (20, 50, 100, 400)]


def simulate(cells: Sequence[Cell], seed: int) -> list[Measured]:
    """Return the result of each cell, measured again if its coverage is low."""
    results = []
    for number, cell in enumerate(cells):
        generator = np.random.default_rng([seed, number])
        result = measure(cell, DRAWS, generator)
        if result.coverage < AGAIN_BELOW:
            result = measure(cell, MORE_DRAWS, generator)
        results.append(result)
    return results


def by_size(results: Sequence[Measured]) -> str:
    """Return a table of the lowest coverage and the mean width, by problems and samples, before and now."""
    lines = [
        "| problems | samples | cells | lowest coverage, before | now | highest, now | mean width, before | now |",
        "|---|---|---|---|---|---|---|---|",
    ]
    sizes = sorted({(result.cell.problems, result.cell.samples) for result in results})
    for problems, samples in sizes:
        inside = [one for one in results if (one.cell.problems, one.cell.samples) == (problems, samples)]
        covered_before, covered = [one.coverage_before for one in inside], [one.coverage for one in inside]
        widths = [np.mean([one.width_before for one in inside]), np.mean([one.width for one in inside])]
        coverages = " | ".join(map(_percent, (min(covered_before), min(covered), max(covered))))
        lines.append(f"| {problems} | {samples} | {len(inside)} | {coverages} | {widths[0]:.3f} | {widths[1]:.3f} |")
    return "\n".join(lines)


def summary(results: Sequence[Measured]) -> str:
    """Return the extremes over a grid, before and now, as Markdown."""
    lines = [
        f"| {len(results)} cells | before | now |",
        "|---|---|---|",
    ]
    before, now = (
        np.array(values) for values in ([one.coverage_before for one in results], [one.coverage for one in results])
    )
    widths = np.array([(one.width_before, one.width) for one in results])
    lines.append(f"| lowest coverage | {_percent(before.min())} | {_percent(now.min())} |")
    lines.append(f"| cells below 93 % | {(before < 0.93).sum()} | {(now < 0.93).sum()} |")
    lines.append(f"| mean coverage | {_percent(before.mean())} | {_percent(now.mean())} |")
    lines.append(f"| cells above 99.5 % | {(before > 0.995).sum()} | {(now > 0.995).sum()} |")
    lines.append(f"| mean width | {widths[:, 0].mean():.3f} | {widths[:, 1].mean():.3f} |")
    return "\n".join(lines)


def worst(results: Sequence[Measured]) -> str:
    """Return the five cells with the lowest coverage as Markdown."""
    lines = [
        "| problems | samples | mean | correlation | second policy | coverage | standard error |",
        "|---|---|---|---|---|---|---|",
    ]
    for one in sorted(results, key=lambda result: result.coverage)[:5]:
        cell, error = one.cell, (one.coverage * (1 - one.coverage) / one.draws) ** 0.5
        lines.append(
            f"| {cell.problems} | {cell.samples} | {cell.mean} | {cell.correlation} | {cell.second or '–'} | "
            f"{_percent(one.coverage, 2)} | {_percent(error, 2)} |"
        )
    return "\n".join(lines)


def page(means: Sequence[Measured], paired: Sequence[Measured], missed: Sequence[Measured]) -> str:
    """Return the text of benchmarks/results/coverage.md."""
    error = _percent((0.95 * 0.05 / DRAWS) ** 0.5)
    parts = [
        "# Coverage of the intervals",
        "Made by `python benchmarks/interval_coverage.py`. The docstring of\n"
        "[interval_coverage.py](../interval_coverage.py) describes the simulation.\n"
        "The intervals are nominal 95 % intervals. "
        f"A coverage of 95 % has a standard error of {error} from {DRAWS:,} draws.\n"
        f"Every cell below {_percent(AGAIN_BELOW)} is from {MORE_DRAWS:,} fresh draws.",
        "## Means of shares",
        f"Difficulty {_listed(MEANS)}; correlation {_listed(CORRELATIONS)}.",
        summary(means),
        by_size(means),
        "The lowest:",
        worst(means),
        "## Paired differences",
        f"Difficulty {_listed(MEANS)}; correlation {_listed(PAIRED_CORRELATIONS)}; second policy "
        f"{_listed(SECOND_POLICIES)}.",
        summary(paired),
        by_size(paired),
        "The lowest:",
        worst(paired),
        "A coverage near 100 % is inevitable where most draws have no difference at all: each of them has the same\n"
        "interval, which then holds the true value always or hardly ever.",
        "## Limit: a rare kind of problem that the sample lacks",
        f"The second policy masters {_percent(MASTERED, 0)} of the problems and is unchanged on the others, which\n"
        "both policies solve in 2 % of the samples. If none of the mastered problems is in the sample, nothing in it\n"
        "shows that there are any.",
        by_size(missed),
    ]
    return "\n\n".join(parts) + "\n"


def _percent(share: float, digits: int = 1) -> str:
    return f"{100 * share:.{digits}f} %"


def _listed(values: Sequence[object]) -> str:
    return ", ".join(map(str, values))


def main() -> int:
    """Simulate both grids, write the page and return 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=RESULTS, help=f"page to write (default: {RESULTS})")
    output: Path = parser.parse_args().output
    started = time.monotonic()
    means, paired = grid()
    results = [simulate(cells, seed) for seed, cells in enumerate((means, paired, limits()))]
    write_atomically(output, page(*results))
    print(f"{output}: {time.monotonic() - started:.0f} s")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
