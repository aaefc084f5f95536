"""Checkpoints of quantized weights.

On other meshes they are equal bit for bit. In other formats they are quantized as one process would.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from checkpointing import format_cases, formats
from checkpointing.selection import MESHES, is_full

#: Uneven shards: 64 and 128 rows of a tp rank over 3 ranks. Formats with blocks are refused there.
UNEVEN = {"dp3xtp2"}
RECIPES = ["current", "delayed", "block", "mxfp8", "nvfp4"]


def ranks(mesh: str) -> int:
    return math.prod((MESHES[mesh] or {}).values())


def run_body(pool, body, mesh: str, **kwargs):
    """Run a body; on GPUs with kernels that always add in the same order."""
    environment = {"NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"}
    return pool.run(body, ranks(mesh), env=environment, axes=MESHES[mesh], **kwargs)


class Saved:
    """Checkpoints of the meshes so far, with their further losses."""

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self.losses: dict[tuple[str, str], list[float]] = {}

    def get(self, pool, mesh: str, recipes: list[str]) -> dict[str, list[float]]:
        """Return losses of a mesh after its save of each format, which is made when first requested."""
        missing = [recipe for recipe in recipes if (mesh, recipe) not in self.losses]
        if missing:
            where = {"directory": self.directory, "name": mesh, "recipes": missing}
            losses = run_body(pool, formats.save_formats, mesh, **where)[0]
            self.losses.update({(mesh, recipe): values for recipe, values in losses.items()})
        return {recipe: self.losses[mesh, recipe] for recipe in recipes}


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Saved:
    return Saved(str(tmp_path_factory.mktemp("formats")))


# Losses of the meshes are losses of bf16 activations, quantized to 8 or 4 bits: sums in a different order move a loss
# by a few units in the last place of bf16.
TOLERANCE = 2**-6
ORIGINS = {"one": ["dp2xtp2"], "dp4": ["tp4", "one"], "tp2": ["dp4"], "tp4": ["dp4", "hsdp2x2"]}
ORIGINS |= {
    "dp2xtp2": ["tp4", "one"],
    "hsdp2x2": ["tp2", "dp4"],
    "hsdp2x2xtp2": ["dp4", "tp4"],
    "dp3xtp2": ["tp4"],
}
LARGE = ("hsdp2x2xtp2", "dp3xtp2")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrize every mesh with one format of each kind of scale; every format on two meshes, or on all with full."""
    if metafunc.definition.name == "test_same_format_on_a_different_mesh":
        wanted = [
            pytest.param(mesh, recipe, marks=pytest.mark.ranks(max(4, ranks(mesh))))
            for mesh in MESHES
            for recipe in RECIPES
            if is_full(metafunc.config)
            or recipe == "current"
            or mesh in ("dp4", "tp4")
            or (recipe == "mxfp8" and mesh not in LARGE)
            if recipe in ("current", "delayed") or mesh not in UNEVEN
        ]
        metafunc.parametrize(("mesh", "recipe"), wanted)


@pytest.mark.covering(
    # Uneven shards, from them and onto them.
    always=[{"mesh": "one", "recipe": "current"}, {"mesh": "dp3xtp2", "recipe": "current"}],
    strength=1,
)
def test_same_format_on_a_different_mesh(pool, saved, mesh, recipe, request):
    origins = list(ORIGINS[mesh])
    if mesh == "one":  # also loads uneven shards, on eight ranks
        origins += LARGE if is_full(request.config) else LARGE[1:] if recipe == "current" else ()
    fits = [name for name in origins if recipe in ("current", "delayed") or name not in UNEVEN]
    names = [name for name in fits if ranks(name) <= pool.max_ranks]
    losses = {name: saved.get(pool, name, [recipe])[recipe] for name in names}
    where = {"directory": saved.directory, "names": names, "recipes": [recipe]}
    for outcomes in run_body(pool, formats.load_formats, mesh, **where):
        for name in names:
            outcome = outcomes[f"{name}-{recipe}"]
            assert outcome["wrong"] == []
            assert outcome["tensors"] > 30
        first = names[0]
        # Each rank's gradient is that of the mean over its own tokens, larger the more ranks share them. A history of
        # smaller gradients lets delayed scaling clip the first larger ones, with or without a checkpoint.
        count = 1 if recipe == "delayed" else len(losses[first])
        if mesh in UNEVEN:
            count = 0  # ranks with fewer tokens weigh as much as the others
        found = outcomes[f"{first}-{recipe}"]["losses"]
        assert found[:count] == pytest.approx(losses[first][:count], rel=TOLERANCE, abs=0)


#: Into a format and out of it, and between formats: every other one of these, others on the next day.
PLAIN = [("none", recipe) for recipe in RECIPES] + [(recipe, "none") for recipe in RECIPES]
BETWEEN = [("delayed", "current"), ("current", "delayed"), ("block", "current")]
BETWEEN += [("block", "mxfp8"), ("mxfp8", "nvfp4")]
BLACKWELL = {"mxfp8", "nvfp4"}


def on(arch: str, recipes: list[str]) -> list[str]:
    """Return the formats that an architecture has."""
    return [recipe for recipe in recipes if arch != "9.0" or recipe not in BLACKWELL]


@pytest.mark.ranks(4)
@pytest.mark.parametrize("master", [True, False], ids=["main", "values"])
@pytest.mark.parametrize(("origin", "mesh"), [("tp4", "dp2xtp2")])
def test_load_into_a_different_format(pool, saved, origin, mesh, master, arch, request, matrix_seed):
    saved.get(pool, origin, on(arch, ["none", *RECIPES]))
    pairs = PLAIN + BETWEEN
    if not is_full(request.config):
        pairs = pairs[matrix_seed % 2 :: 2]
        if not master:  # replacement for the main weights, and how it is quantized, is the same for all
            pairs = pairs[matrix_seed // 2 % 2 :: 2]
    pairs = [pair for pair in pairs if on(arch, list(pair)) == list(pair)]
    where = {"directory": saved.directory, "name": origin, "pairs": pairs, "master": master}
    for outcomes in run_body(pool, formats.convert_formats, mesh, **where):
        for pair in pairs:
            outcome = outcomes["-".join(pair)]
            assert outcome["wrong"] == [], pair
            # Weights of current scaling keep their bytes and scales in delayed scaling.
            converted = len(outcome["converted"])
            assert converted >= 4 or (pair == ("current", "delayed") and converted == 0)
            assert all(math.isfinite(loss) for loss in outcome["losses"])


@pytest.mark.ranks(4)
@pytest.mark.parametrize("recipe", ["current", "nvfp4"])
def test_negative_control_scale_per_shard(pool, saved, recipe):
    """Negative control: a load that quantizes each shard separately differs from one process."""
    saved.get(pool, "tp4", ["none"])
    where = {"directory": saved.directory, "name": "tp4", "pairs": [("none", recipe)], "spoil": True}
    results = run_body(pool, formats.convert_formats, "dp2xtp2", **where)
    assert any(outcome[f"none-{recipe}"]["wrong"] for outcome in results)


@pytest.mark.ranks(4)
def test_quantizing_main_weights_gives_the_saved_bytes(pool, arch):
    """Check in every format that quantized main weights have the bytes of the optimizer's step."""
    for recipe in on(arch, RECIPES):
        for outcome in run_body(pool, formats.compare_quantized_main_weights, "dp2xtp2", recipe=recipe):
            assert outcome["wrong"] == [], recipe
            assert outcome["tensors"] >= 8, recipe


def test_unfit_delayed_scaling_state(pool, tmp_path):
    outcome = pool.run(format_cases.unfit_delayed_scaling_state, 1, directory=str(tmp_path))[0]
    assert (
        "4 with a different recipe (attention.qkv: fp8_format: saved HYBRID, model has E4M3"
        in outcome["refused"]
    )
    assert '"mlp": "with a different recipe' in outcome["left"]
    assert outcome["wrong"] == []
    (note,) = outcome["notes"]
    assert "delayed-scaling state of 3 module(s) not in the checkpoint: histories start again" in note


@pytest.mark.ranks(4)
def test_shards_that_split_quantization_blocks(pool, tmp_path, arch):
    """Check that each rank reads the blocks that cover its rows and drops the remaining rows."""
    where = {"directory": str(tmp_path), "recipes": on(arch, ["mxfp8", "nvfp4", "current"])}
    pool.run(format_cases.load_partial_blocks, 1, axes={"dp_shard": 1}, save=True, **where)
    for axes in ({"dp_shard": 4}, {"dp_shard": 2, "tp": 2}, {"dp_shard": 3, "tp": 1}):
        results = pool.run(
            format_cases.load_partial_blocks, math.prod(axes.values()), axes=axes, save=False, **where
        )
        for recipe in where["recipes"]:
            assert sum(outcomes[recipe]["cut"] for outcomes in results) > 0
            for outcomes in results:
                assert outcomes[recipe]["wrong"] == [], (axes, recipe)
                assert set(outcomes[recipe]["converted"]) == {"mlp.fc1_weight", "mlp.fc2_weight"}


@pytest.mark.covering(always=[{"pair": "mxfp8_2d-mxfp8_2d"}], strength=0)
@pytest.mark.recipe("mxfp8_2d")
@pytest.mark.ranks(4)
@pytest.mark.parametrize("pair", ["mxfp8_2d-mxfp8_2d", "mxfp8-mxfp8_2d", "mxfp8_2d-mxfp8"])
def test_mxfp8_with_one_plane(pool, saved, pair):
    """Check that 2-D MXFP8 is saved as one buffer and 1-D MXFP8 as two. Each loads into the other by value."""
    origin, here = pair.split("-")
    saved.get(pool, "tp4", ["mxfp8", "mxfp8_2d"] if origin == here else [origin])
    where = {"directory": saved.directory}
    if origin == here:
        for outcomes in run_body(
            pool, formats.load_formats, "dp2xtp2", names=["tp4"], recipes=[here], **where
        ):
            assert outcomes[f"tp4-{here}"]["wrong"] == [] and outcomes[f"tp4-{here}"]["tensors"] > 20
        one, two = (_quantized_bytes(f"{saved.directory}/tp4-{recipe}") for recipe in (here, "mxfp8"))
        assert two == 2 * one > 0
        return
    where |= {"name": "tp4", "pairs": [(origin, here)], "master": False}
    for outcomes in run_body(pool, formats.convert_formats, "dp2xtp2", **where):
        assert outcomes[pair]["wrong"] == [] and len(outcomes[pair]["converted"]) >= 4


def _quantized_bytes(path: str) -> int:
    """Return the bytes of the components of quantized weights in a checkpoint."""
    from te_fsdp.checkpoint.reader import Contents

    contents = Contents.of_checkpoint(Path(path))
    components = [(contents.components(name) or {}).values() for name in contents.manifest.parameters]
    return sum(math.prod(one.shape) * one.dtype.itemsize for found in components for one in found)
