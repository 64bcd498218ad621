import os
import torch
from tests.support.comparison import run, stock
def compare(world, flags, name, extra=()):
    ours = run(world, [*flags, "--pipeline-schedule", name, "--pipeline-vocabulary", "shared", *extra])
    theirs = stock(world, *flags)
    print(name, flags)
    print("losses", ours.losses, theirs.losses)
    print("norms", ours.norms, theirs.norms, "val", ours.validation, theirs.validation)
    assert ours.gradients.keys()==theirs.gradients.keys(), (ours.gradients.keys() ^ theirs.gradients.keys())
    worst = max((( (g-theirs.gradients[n]).abs().max()/theirs.gradients[n].abs().max()).item(), n) for n,g in ours.gradients.items())
    print("worst", worst)
def test_it():
    for one in os.environ.get("CASES","1f1b 2").split(";"):
        name, pp, *flags = one.split()
        world = int(os.environ.get("WORLD", pp))
        compare(world, ("--pipeline-model-parallel-size", pp, *flags), name)
