"""Two ranks over the ring backend against one: the same tokens, and the same codes head by head."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from kvcompress.errors import ConfigError
from tests.distributed.rank import CALIBRATED, COMMVQ, PLAIN, calibrated, findings, model_of

RANKS = 2
SECONDS = 150  # until ranks that wait for each other are given up
ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(
    not mx.distributed.is_available("ring"), reason="this MLX has no ring backend"
)

Found = dict[str, np.ndarray]


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [int(one.getsockname()[1]) for one in sockets]
    for one in sockets:
        one.close()
    return ports


def run_ranks(folder: Path) -> list[Found]:
    """What ``mlx.launch --backend ring -n 2`` comes down to."""
    hosts = folder / "hosts.json"
    hosts.write_text(json.dumps([[f"127.0.0.1:{port}"] for port in free_ports(RANKS)]))
    command = [sys.executable, "-m", "tests.distributed.rank", str(folder)]
    ranks: list[subprocess.Popen[str]] = []
    try:
        for rank in range(RANKS):
            told = {"MLX_RANK": str(rank), "MLX_HOSTFILE": str(hosts), "OPENBLAS_NUM_THREADS": "1"}
            ranks.append(
                subprocess.Popen(
                    command,
                    cwd=ROOT,
                    env={**os.environ, **told},
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
            )
        said = [one.communicate(timeout=SECONDS)[0] for one in ranks]
    finally:
        for one in ranks:
            one.kill()
    for one, text in zip(ranks, said, strict=True):
        assert one.returncode == 0, text
    return [dict(np.load(folder / f"{rank}.npz")) for rank in range(RANKS)]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[Found, list[Found]]:
    """Of one rank that has all, and of each of two."""
    folder = tmp_path_factory.mktemp("ranks")
    model = model_of()
    calibration = calibrated(model, CALIBRATED)
    calibration.save(folder / "cal.safetensors")
    return findings(model, calibration), run_ranks(folder)


@pytest.mark.parametrize("kind", [*PLAIN, *CALIBRATED])
def test_two_ranks_give_the_tokens_of_one(kind: str, found: tuple[Found, list[Found]]) -> None:
    alone, ranks = found
    expected = alone[f"{kind}/tokens"].tolist()
    assert len(set(expected)) > 8
    for one in ranks:
        assert one[f"{kind}/tokens"].tolist() == expected


@pytest.mark.parametrize("kind", [*list(PLAIN)[1:], *CALIBRATED])
def test_each_rank_codes_its_heads_as_one_rank_does(
    kind: str, found: tuple[Found, list[Found]]
) -> None:
    alone, ranks = found
    assert alone[f"{kind}/coded"] >= 48
    for part in ("keys", "values"):
        whole = np.split(alone[f"{kind}/{part}"], RANKS)
        for one, mine in zip(ranks, whole, strict=True):
            # Sums over ranks round otherwise, so a vector on the edge may get another code.
            close = np.isclose(one[f"{kind}/{part}"], mine, atol=1e-3).all(axis=-1)
            assert close.mean() > 0.97
        assert not np.isclose(ranks[0][f"{kind}/{part}"], whole[1], atol=1e-3).all(axis=-1).any()


def test_commvq_is_calibrated_on_the_ranks(found: tuple[Found, list[Found]]) -> None:
    alone, ranks = found
    with pytest.raises(ConfigError, match="tables of commvq cannot be divided by KV heads"):
        calibrated(model_of(), {"": COMMVQ}).shard(0, RANKS)
    first, second = (one["commvq/tokens"].tolist() for one in ranks)
    assert first == second
    exact = alone["turboquant, calibrated/keys"]  # near enough to what commvq was given
    for one, mine in zip(ranks, np.split(exact, RANKS), strict=True):
        assert error(one["commvq/keys"], mine) < 1.5 * error(alone["commvq/keys"], exact)


def error(keys: np.ndarray, exact: np.ndarray) -> float:
    return float(np.square(keys - exact).mean())


def test_the_whole_calibration_is_refused_to_a_rank(found: tuple[Found, list[Found]]) -> None:
    for one in found[1]:
        assert "pass calibration.shard(rank, 2)" in str(one["refused"])
