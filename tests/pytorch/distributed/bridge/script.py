"""A training script for megatron-fsdp, in the order of its README."""

import os

import torch
import torch.distributed.checkpoint
from megatron_fsdp import fully_shard_model, fully_shard_optimizer

directory = os.environ["CHECKPOINTS"]
device = "cuda" if torch.cuda.is_available() else "cpu"
if not torch.distributed.is_initialized():
    torch.distributed.init_process_group()
rank = torch.distributed.get_rank()
if device == "cuda":
    torch.cuda.set_device(rank)

torch.manual_seed(0)
model = torch.nn.Transformer(
    d_model=32, nhead=4, num_encoder_layers=1, num_decoder_layers=2, dim_feedforward=48, dropout=0.0
)
fsdp_model = fully_shard_model(
    module=model, fsdp_unit_modules=[torch.nn.TransformerEncoder, torch.nn.TransformerDecoder]
)
adam = torch.optim.AdamW(params=fsdp_model.parameters(), lr=0.01)
optimizer = fully_shard_optimizer(optimizer=adam)


def train(steps):
    losses = []
    for step in steps:
        generator = torch.Generator().manual_seed(100 * step + rank)
        source, target = (torch.randn(3, 5, 32, generator=generator).to(device) for _ in range(2))
        loss = torch.nn.functional.mse_loss(fsdp_model(source, target), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


before = train(range(3))
torch.distributed.checkpoint.save(
    {"model": fsdp_model.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint_id=directory
)
ahead = train(range(3, 5))

state = {"model": fsdp_model.state_dict(), "optimizer": optimizer.state_dict()}
torch.distributed.checkpoint.load(state_dict=state, checkpoint_id=directory)
fsdp_model.load_state_dict(state["model"], strict=False)
optimizer.load_state_dict(state["optimizer"])
again = train(range(3, 5))
