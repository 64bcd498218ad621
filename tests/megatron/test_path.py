"""The files that a reader opens from the command line to the first W of a ``zb-h1`` step.

``docs/architecture.md`` lists them, in the order in which they are read.  Here two ranks train a step in a
process in which no other file of the package can be imported.
"""

import json
import re
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/architecture.md"
TITLE = "## From the command line to the first W"
MOST = 61
SUPPORT = ["cpu/*.py", "version.py"]
"""What lets the step run without a GPU, and no reader of a step opens."""
LINE = [
    *("schedule/simulate.py", "costs/*.py", "job/stage_costs.py"),
    *("job/flag_effects.py", "schedule/formats/costs_file.py"),
]
"""What the first rank estimates the line of the start by."""

PROGRAM = '''
import json, os, sys
from fnmatch import fnmatch

LISTED, LINE = map(json.loads, sys.argv[1:])

class Wall:
    """Lets the listed files be imported, and packages."""

    def find_spec(self, name, path=None, target=None):
        package, _, module = name.partition(".")
        inner = module.replace(".", "/")
        if package == "megatron_pp_ext" and module and not os.path.isdir(f"megatron_pp_ext/{inner}"):
            if not any(fnmatch(f"{inner}.py", file) for file in LISTED):
                raise ImportError(f"{name} is not in the list")

sys.meta_path.insert(0, Wall())

import pytest

from tests.support import ranks  # the stand-ins for torch.cuda, before Megatron is imported

import megatron.training.initialize
import megatron.training.training
import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.training import get_args, get_model, initialize_megatron
from megatron.training.arguments import core_transformer_config_from_args, parse_and_validate_args

from megatron_pp_ext.cpu.flags import with_cpu_flags
from megatron_pp_ext.megatron import patching
from megatron_pp_ext.megatron.core import chunk_pipelines, data_parallel, local_linear
from megatron_pp_ext.megatron.core import optimizer, placed_models
from megatron_pp_ext.megatron.runners import choose
from megatron_pp_ext.megatron.trainer import agreement, validation

# The hooks on the way of a step; the others are for what this one does not ask.
hooked = validation, agreement, chunk_pipelines, placed_models, choose, local_linear, optimizer, data_parallel
patching.apply(patching.hooks_of(*hooked))
megatron.training.initialize._compile_dependencies = lambda: None  # no data set is read
FLAGS = """--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --max-position-embeddings 8
    --micro-batch-size 1 --global-batch-size 3 --train-iters 1 --lr 0.01 --eval-iters 0 --eval-interval 9
    --tokenizer-type NullTokenizer --vocab-size 31 --make-vocab-size-divisible-by 1 --transformer-impl local
    --no-pipeline-log --pipeline-model-parallel-size 2 --untie-embeddings-and-output-weights""".split()

def build(pre_process=True, post_process=True, config=None, **of_chunk):
    config = config or core_transformer_config_from_args(get_args())
    ends = {"pre_process": pre_process, "post_process": post_process}
    of_chunk["share_embeddings_and_output_weights"] = False
    return GPTModel(config, get_gpt_layer_local_spec(), 32, 8, **ends, **of_chunk)

def forward_step(batches, model):
    tokens = next(batches)
    losses = model(tokens, torch.arange(8)[None], None, labels=tokens)
    return losses, lambda losses: (losses.mean(), {"loss": losses.mean().detach()})

def train(rank, flags):
    LISTED.extend(LINE if rank == 0 else [])
    sys.argv = ["train.py", *with_cpu_flags([*FLAGS, *flags])]
    parse_and_validate_args()
    initialize_megatron()
    model = get_model(build)
    with torch.no_grad():
        for chunk in model:
            for parameter in chunk.parameters():
                parameter.copy_(torch.linspace(-0.1, 0.1, parameter.numel()).view_as(parameter))
    losses = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=(torch.arange(8)[None] + microbatch for microbatch in range(3)),
        model=model, num_microbatches=3, seq_length=8, micro_batch_size=1,
    )
    sums = [parameter.main_grad.sum().item() for chunk in model for parameter in chunk.parameters()]
    names = [name for name in sys.modules if name.startswith("megatron_pp_ext.")]
    return [microbatch["loss"].item() for microbatch in losses], sums, names

stock, ours = ranks.run_ranks(train, 2, []), ranks.run_ranks(train, 2, ["--pipeline-schedule", "zb-h1"])
print(json.dumps([stock, ours]))
'''


def listed() -> list[str]:
    """The files of the page's list, which begin its lines; ``families/*.py`` is any one of a folder."""
    section = PAGE.read_text().partition(TITLE)[2].partition("\n## ")[0]
    return re.findall(r"^\d+\. `([\w/.*]+)`", section, re.MULTILINE)


def step(files: list[str]) -> subprocess.CompletedProcess[str]:
    """Train a step by stock's schedule and by ``zb-h1`` where only ``files`` can be imported."""
    command = [sys.executable, "-c", PROGRAM, json.dumps(files), json.dumps(LINE)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_a_step_needs_no_file_that_the_page_does_not_list() -> None:
    files = listed()
    ran = step([*files, *SUPPORT])
    assert ran.returncode == 0, ran.stderr
    stock, ours = json.loads(ran.stdout.splitlines()[-1])
    assert [rank[:2] for rank in ours] == [rank[:2] for rank in stock]
    assert len(stock[1][0]) == 3
    by_rank = [[name.partition(".")[2].replace(".", "/") + ".py" for name in rank[2]] for rank in ours]
    for rank, also in enumerate((LINE, [])):
        unused = [file for file in (*files, *also) if not any(fnmatch(name, file) for name in by_rank[rank])]
        assert not unused, f"listed, and not needed on rank {rank}: {unused}"
    assert len(files) <= MOST


@pytest.mark.wide
def test_a_file_that_is_missing_in_the_list_is_noticed() -> None:
    ran = step([*(file for file in listed() if file != "schedule/walk.py"), *SUPPORT])
    assert "schedule.walk is not in the list" in ran.stderr
