"""How a claim runs: scale and seed, random numbers, and sweeps whose finished items are kept."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np

import attoscope
from attoscope.errors import AttoscopeError
from attoscope.papers.trials import Trials, digest, pack, unpack

T = TypeVar("T")
Scale = Literal["quick", "paper"]
SCALES: tuple[Scale, ...] = ("quick", "paper")
# Code that no measurement runs through; other papers' modules are left out as well.
_APART = ("cli", "report", "papers")
_REACH_SECONDS = 10


# Is told how far a sweep is: its label, how many of all items are done, and were on disk.
Watcher = Callable[[str, int, int, int], None]


@dataclass(frozen=True, slots=True)
class Workers:
    """Where items are computed: processes of this machine, or the workers of a Dask cluster."""

    jobs: int = 1
    client: Any = None

    def compute(
        self, function: Callable[[Any], Any], items: Sequence[tuple[int, Any]]
    ) -> Iterator[tuple[int, bytes]]:
        """The packed result of each numbered item, as they are finished."""
        from joblib import Parallel, delayed, parallel_config

        if not items:
            return
        cluster = {"backend": "dask", "client": self.client, "n_jobs": -1}
        here = {"backend": "loky", "inner_max_num_threads": 1}
        # A memory map for large arrays would make them read-only in some runs and not in others.
        here |= {"n_jobs": min(self.jobs, len(items)), "max_nbytes": None}
        with parallel_config(**(cluster if self.client is not None else here)):
            parallel = Parallel(return_as="generator_unordered")
            yield from parallel(delayed(_packed)(function, i, item) for i, item in items)


@dataclass(frozen=True, slots=True)
class Run:
    """One claim's run. `Run()` by itself is a quick run in this process that keeps nothing.

    `scale` is "quick" or "paper", `seed` what all random numbers derive from.
    """

    scale: Scale = "quick"
    seed: int = 0
    workers: Workers = field(default=Workers(), repr=False)
    trials: Trials | None = field(default=None, repr=False)
    watcher: Watcher | None = field(default=None, repr=False)

    def pick(self, *, quick: T, paper: T) -> T:
        """One of the two, by the scale of the run."""
        return quick if self.scale == "quick" else paper

    def rng(self, *keys: int | np.integer[Any] | str) -> np.random.Generator:
        """A random generator that depends on the seed and the keys, and on nothing else."""
        plain = [key if isinstance(key, str) else int(key) for key in keys]
        name = hashlib.sha256(repr(plain).encode()).digest()
        words = np.frombuffer(name, "<u4").tolist()
        return np.random.default_rng(np.random.SeedSequence([self.seed, *words]))

    def map(
        self, function: Callable[[Any], T], items: Iterable[Any], label: str = "items"
    ) -> list[T]:
        """`[function(item) for item in items]`, in parallel, and not again what is finished.

        `function` is one of a module, without variables from around it; items and results are
        plain data and numpy arrays (else TypeError). Randomness comes with the item: give it a
        seed. A kept result is used where the item, the label, the seed, the scale and the source
        code are the same.
        """
        _check_function(function)
        todo = list(items)
        results: dict[int, T] = {}
        keys = self._keys(function, todo, label)
        if self.trials is not None:
            for i, key in enumerate(keys):
                if (found := self.trials.get(key)) is not None:
                    (results[i],) = found
        kept = len(results)
        self._say(label, kept, len(todo), kept)
        missing = [(i, item) for i, item in enumerate(todo) if i not in results]
        for i, data in self.workers.compute(function, missing):
            if self.trials is not None:
                self.trials.put(keys[i], data)
            results[i] = unpack(data)
            self._say(label, len(results), len(todo), kept)
        return [results[i] for i in range(len(todo))]

    def _keys(self, function: Callable[[Any], Any], items: list[Any], label: str) -> list[str]:
        if self.trials is None:
            return []
        code = _code(function)
        shared = (attoscope.__version__, code, label, self.scale, self.seed)
        return [digest((shared, item)) for item in items]

    def _say(self, label: str, done: int, total: int, kept: int) -> None:
        if self.watcher is not None:
            self.watcher(label, done, total, kept)


def _packed(function: Callable[[Any], Any], index: int, item: Any) -> tuple[int, bytes]:
    """One item, computed on one thread: the same last digits wherever it runs."""
    from threadpoolctl import threadpool_limits

    with threadpool_limits(1):
        return index, pack(function(item))


def _check_function(function: Callable[[Any], Any]) -> None:
    name = getattr(function, "__qualname__", type(function).__name__)
    if not inspect.isfunction(function) or "<" in name:
        raise TypeError(
            f"map: got {name}; expected a function of a module, since a result that is kept must "
            "not depend on variables around it: pass what it needs in the items"
        )


def _code(function: Callable[[Any], Any]) -> str:
    """A digest of the source that the function's results can depend on."""
    parts = function.__module__.split(".")
    if parts[:2] == ["attoscope", "papers"] and len(parts) > 2:
        paper = Path(attoscope.__file__).parent / "papers" / parts[2]
        source = _read([paper.with_suffix(".py"), *sorted(paper.rglob("*.py"))])
    else:
        try:
            source = inspect.getsource(inspect.getmodule(function) or function).encode()
        except (OSError, TypeError):  # of a notebook or another session, which has no file
            source = inspect.getsource(function).encode()
    name = f"{function.__module__}.{function.__qualname__}"
    return digest((name, hashlib.sha256(source).hexdigest(), _foundations()))


@cache
def _foundations() -> str:
    """A digest of attoscope's own source, as it was when the first sweep started."""
    root = Path(attoscope.__file__).parent
    files = sorted(root.rglob("*.py"))
    return hashlib.sha256(
        _read([file for file in files if file.relative_to(root).parts[0] not in _APART])
    ).hexdigest()


def _read(files: list[Path]) -> bytes:
    return b"\0".join(file.read_bytes() for file in files if file.is_file())


@contextmanager
def workers(jobs: int | None = None, scheduler: str | None = None) -> Iterator[Workers]:
    """This many processes (all cores by default), or the Dask cluster at this address."""
    if jobs is not None and jobs < 1:
        raise AttoscopeError(f"jobs: got {jobs}; expected a number of processes from 1 on")
    if scheduler is None:
        from joblib import cpu_count

        yield Workers(jobs or cpu_count())
        return
    if jobs is not None:
        raise AttoscopeError(
            "jobs and scheduler were given together; choose one: on a cluster its own size counts"
        )
    client = _client(scheduler)
    try:
        yield Workers(client=client)
    finally:
        client.close()


def _client(scheduler: str) -> Any:
    """A client of the cluster, whose workers were tried."""
    try:
        import distributed
        from distributed.comm.addressing import resolve_address
    except ImportError as error:
        raise AttoscopeError(
            "scheduler: a cluster needs the package distributed, which is not installed; run: "
            "pip install 'attoscope[cluster]'"
        ) from error
    open_client: Any = distributed.Client
    try:
        # A client of an address that makes no sense is left half made, and complains later.
        resolve_address(scheduler)
        client = open_client(scheduler, timeout=_REACH_SECONDS, set_as_default=False)
    except (OSError, ValueError, TypeError, RuntimeError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise AttoscopeError(
            f"scheduler: {scheduler!r} cannot be reached ({reason}); expected the address of a "
            "running Dask scheduler, such as tcp://10.0.0.1:8786"
        ) from error
    try:
        _try_workers(client, scheduler)
    except BaseException:
        client.close()
        raise
    return client


def _try_workers(client: Any, scheduler: str) -> None:
    try:
        versions = client.run(_version)
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise AttoscopeError(
            f"scheduler: the workers at {scheduler} cannot load attoscope ({reason}); install "
            f"attoscope {attoscope.__version__} on them"
        ) from error
    if not versions:
        raise AttoscopeError(f"scheduler: {scheduler} has no workers; start at least one")
    others = sorted(set(versions.values()) - {attoscope.__version__})
    if others:
        raise AttoscopeError(
            f"scheduler: the workers at {scheduler} have attoscope {', '.join(others)}; expected "
            f"{attoscope.__version__}, as here: install the same version"
        )


def _version() -> str:
    return attoscope.__version__
