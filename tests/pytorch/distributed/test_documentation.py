"""Python blocks of the README or a page, run on four ranks.

The blocks of a page run in their order.

The quickstart, train, huggingface, plan and cli pages have tests of their own in tests/unit, the faults of upstream.md
in test_te_faults.py; what emulation.md shows must come before anything is imported.
"""

from __future__ import annotations

import ast
import re
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import harness
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict

from tests.unit import remote_storage

ROOT = Path(__file__).resolve().parents[3]
#: Page -> what each of its blocks takes for granted: methods of `Reader`.
PAGES = {
    "README.md": ["nothing"],
    "docs/activations.md": ["nothing", "nothing"],
    "docs/checkpoints.md": [
        "training",
        "training",
        "training",
        "saved",
        "saved",
        "saved_by_dcp",
        "on_s3",
    ],
    "docs/checks.md": ["copies"],
    "docs/compile.md": ["built"],
    "docs/concepts.md": ["nothing"],
    "docs/context_parallel.md": ["of_tokens", "of_tokens"],
    "docs/data.md": ["data", "training", "evaluated", "evaluated", "evaluated"],
    "docs/errors.md": ["training"],
    "docs/fast.md": ["training"],
    "docs/graphs.md": ["microbatched", "many_microbatches", "built"],
    "docs/hfsdp.md": ["copies"],
    "docs/index.md": ["nothing"],
    "docs/logging.md": ["logged", "on_a_gpu"],
    "docs/megatron.md": ["nothing"],
    "docs/moe.md": ["routed"],
    "docs/no_shard.md": ["built"],
    "docs/optimizers.md": ["built", "training"],
    "docs/pipeline.md": ["nothing", "nothing", "nothing"],
    "docs/porting.md": ["nothing", "nothing"],
    "docs/precision.md": ["built", "passed", "training"],
    "docs/quantized.md": ["nothing"],
    "docs/strategies.md": ["copies"],
    "docs/transport.md": ["built", "built"],
    "docs/troubleshooting.md": ["training"],
}
WIDTH, SEQUENCE, BATCH = 64, 16, 2


class MyModel(nn.Module):
    """Everything that a page calls by name."""

    def __init__(self, device: Any = "meta", **parallel: Any) -> None:
        import transformer_engine.pytorch as te

        super().__init__()
        plain = {"device": device, "dtype": torch.bfloat16}
        layer = {"set_parallel_mode": True, "fuse_qkv_params": True, "params_dtype": torch.bfloat16}
        self.position = nn.Parameter(torch.empty(WIDTH, **plain))
        self.embedding, self.encoder = nn.Linear(WIDTH, WIDTH, **plain), nn.Linear(WIDTH, WIDTH, **plain)
        self.layer = te.TransformerLayer(WIDTH, 2 * WIDTH, 4, device=device, **layer, **parallel)
        self.router, self.norm = nn.Linear(WIDTH, WIDTH, **plain), te.RMSNorm(WIDTH, **plain)
        self.head = nn.Linear(WIDTH, WIDTH, **plain)

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.position)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.encoder(self.embedding(x)) + self.position
        return self.head(self.norm(self.router(self.layer(x))))

    def generate(self, prompt: torch.Tensor) -> torch.Tensor:
        return self(self(prompt))


class OfTokens(nn.Module):
    """A language model, batch first."""

    def __init__(self, **parallel: Any) -> None:
        import transformer_engine.pytorch as te

        super().__init__()
        plain = {"device": "meta", "dtype": torch.bfloat16}
        layer = {"set_parallel_mode": True, "params_dtype": torch.bfloat16, "attn_input_format": "bshd"}
        layer |= {"attention_dropout": 0.0, "hidden_dropout": 0.0, "device": "meta"}
        self.embedding, self.head = nn.Embedding(99, WIDTH, **plain), nn.Linear(WIDTH, 99, **plain)
        self.layer = te.TransformerLayer(WIDTH, 2 * WIDTH, 4, **layer, **parallel)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer(self.embedding(tokens)))


class Reader:
    """Runs blocks as a reader would, with the names that they assume; `names` are theirs."""

    def __init__(self) -> None:
        import transformer_engine.pytorch as te
        from transformer_engine.common.recipe import Float8CurrentScaling

        import te_fsdp

        self.names: dict[str, Any] = {"te": te, "te_fsdp": te_fsdp, "torch": torch, "MyModel": MyModel}
        self.names |= {"recipe": Float8CurrentScaling(), "generator": torch.Generator()}
        self.names |= {"build_model": MyModel, "microbatches": [self.batch() for _ in range(2)]}
        self.missing = False  # what a block needs and this machine lacks
        self.nothing()

    def batch(self) -> torch.Tensor:
        return torch.randn(SEQUENCE, BATCH, WIDTH, dtype=torch.bfloat16, device=harness.device())

    def meshes(self, **axes: int) -> None:
        self.names["meshes"] = self.names["te_fsdp"].Meshes.build(**axes, device_type=harness.device_type())

    def nothing(self) -> None:
        self.meshes(dp_shard=-1)

    def built(self) -> None:
        self.meshes(dp_shard=-1, tp=2)
        self.names["model"] = MyModel(**self.names["meshes"].te_kwargs())

    def copies(self) -> None:
        self.meshes(dp_replicate=2, dp_shard=-1)
        self.names["model"] = MyModel()

    def microbatched(self) -> None:
        """Provide a model with a mark of the first microbatch, and steps of two microbatches, eager on the CPU."""
        self.built()
        te_fsdp, model = self.names["te_fsdp"], self.names["model"]
        te_fsdp.fully_shard(model, self.names["meshes"])
        te_fsdp.materialize(model)
        forward = model.forward
        model.forward = lambda x, is_first_microbatch: forward(x)
        pair = torch.stack([self.batch(), self.batch()])
        self.names |= {"loader": [(pair, pair)] * 2, "scheduler": SimpleNamespace(step=lambda: None)}
        self.names["loss_of"] = lambda output, labels: (output - labels).float().square().mean()

    def many_microbatches(self) -> None:
        """Provide a step of 16 microbatches."""
        self.microbatched()
        self.names["optimizer"] = torch.optim.AdamW(self.names["model"].parameters())
        self.names |= dict.fromkeys(("tokens", "labels"), torch.stack([self.batch()] * 16))

    def data(self) -> None:
        """Provide a data set of tokens."""
        self.nothing()
        self.names |= {"dataset": torch.arange(256).reshape(64, 4), "epochs": 2}

    def of_tokens(self) -> None:
        """Provide a model of tokens on a context-parallel axis, and batches for it."""
        self.meshes(dp_shard=-1, cp=2, tp=2)
        tokens = torch.arange(BATCH * SEQUENCE, device=harness.device()).view(BATCH, SEQUENCE)
        self.names |= {"loader": [(tokens, tokens)], "build_model": OfTokens}
        self.names["model"] = OfTokens(**self.names["meshes"].te_kwargs())

    def routed(self) -> None:
        """Provide tokens, the experts that they choose, and this rank's experts."""
        self.meshes(dp_shard=-1, ep=2)
        tokens, number, top_k = SEQUENCE * BATCH, 4, 2
        chosen = torch.rand(tokens, number, device=harness.device()).topk(top_k).indices
        self.names |= {"tokens_per_rank": tokens, "num_experts": number, "top_k": top_k, "chosen": chosen}
        self.names |= {"tokens": self.batch().flatten(0, 1), "act": torch.nn.functional.gelu}
        self.names["weights"] = torch.ones(tokens, top_k, device=harness.device())
        for name in ("up", "down"):
            experts = self.names["te"].GroupedLinear(number // 2, WIDTH, WIDTH, params_dtype=torch.bfloat16)
            self.names[name] = experts.to(harness.device())

    def training(self, **options: Any) -> None:
        """Provide a sharded model and its optimizer after a step."""
        self.built()
        te_fsdp, model = self.names["te_fsdp"], self.names["model"]
        te_fsdp.fully_shard(model, self.names["meshes"], **options)
        te_fsdp.materialize(model)
        self.names["optimizer"] = optimizer = torch.optim.AdamW(model.parameters())
        self.names["loss"] = lambda output: output.float().square().mean()
        self.names["loss"](model(self.batch())).backward()
        optimizer.step()
        optimizer.zero_grad()

    def passed(self) -> None:
        """Provide the loss of a forward, under a precision policy."""
        self.training(precision=self.names["te_fsdp"].MixedPrecisionPolicy())
        self.names["loss"] = self.names["loss"](self.names["model"](self.batch()))

    def logged(self) -> None:
        """Provide a loop over two steps."""
        self.training()
        loss = self.names["loss"]
        self.names.update(batch=BATCH, length=SEQUENCE, steps=2)
        self.names["loss_of"] = lambda model, step: loss(model(self.batch()))
        self.missing = find_spec("tensorboard") is None

    def profiled(self) -> None:
        self.logged()
        self.missing = False
        loss_of, model = self.names["loss_of"], self.names["model"]
        self.names.update(
            rank=torch.distributed.get_rank(), train_step=lambda n: loss_of(model, n).backward()
        )

    def on_a_gpu(self) -> None:
        self.profiled()
        self.missing = not torch.cuda.is_available()

    def evaluated(self) -> None:
        """Provide a model, data to evaluate it on, and to generate from."""
        self.training()
        self.names |= {"batches": [self.batch()] * 2, "loss_of": self.names["loss"], "prompt": self.batch()}

    def saved(self) -> None:
        self.training()
        model, optimizer = self.names["model"], self.names["optimizer"]
        self.names["te_fsdp"].checkpoint.save(self.names["path"], model, optimizer, extra={"step": 1})

    def on_s3(self) -> None:
        """Provide local files in the place of a bucket."""
        remote_storage.register(remote_storage.StandIn)
        self.training()

    def saved_by_dcp(self) -> None:
        self.training()
        model, optimizer = get_state_dict(self.names["model"], self.names["optimizer"])
        dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id="plain-dcp")

    def run(self, block: str, given: str, path: str) -> None:
        """Run a block; each further call of `fully_shard` in it gets a separate model."""
        self.names["path"] = path
        getattr(self, given)()
        if self.missing:
            return
        for number, statement in enumerate(ast.parse(block).body):
            code = ast.unparse(statement)
            if number and given == "copies" and code.count("fully_shard(") and "Meshes" not in block:
                self.copies()
            exec(compile(code, path, "exec"), self.names)


def read(page: str, blocks: list[str], folder: str) -> list[str]:
    """Run a page's blocks; return the names that they and the blocks they need have left."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        reader = Reader()
        for number, (block, given) in enumerate(zip(blocks, PAGES[page], strict=True)):
            reader.run(block, given, f"{Path(page).stem}/{number}")
    return sorted(reader.names)


def blocks_of(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", (ROOT / page).read_text(), flags=re.MULTILINE | re.DOTALL)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("page", PAGES)
def test_python_blocks_run(pool, page, tmp_path):
    for names in pool.run(read, 4, page=page, blocks=blocks_of(page), folder=str(tmp_path)):
        assert {"te_fsdp", "meshes"} <= set(names)


@pytest.mark.ranks(4)
def test_negative_control_failing_block(pool, tmp_path):
    (block,) = blocks_of("docs/no_shard.md")
    late = "te_fsdp.fully_shard(model, meshes)\n" + block
    for error in pool.run_expect_error(read, 4, page="docs/no_shard.md", blocks=[late], folder=str(tmp_path)):
        assert error.type_name == "OrderError"


def test_every_page_is_tested():
    elsewhere = {"emulation", "huggingface", "plan", "quickstart", "rollout", "train"}
    pages = ["README.md", *(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]
    assert {page for page in pages if blocks_of(page)} == PAGES.keys() | {
        f"docs/{name}.md" for name in elsewhere
    }
