"""Profiles on which formulas of cuts are tried: a published one, models by arithmetic, and random chains."""

from itertools import pairwise

import numpy as np

from megatron_pp_ext.schedule.formats import profile
from megatron_pp_ext.schedule.formats.profile import Profile, ProfiledLayer
from reference import vgg16

IMAGES = 64
"""Images of a microbatch, in fp32, as in the published profile of VGG-16."""

IMAGE_RATE, TEXT_RATE = 1e13, 3e14
"""Operations a second: of one GPU of PipeDream's time in fp32, and of a present one in bf16."""


def profiles() -> dict[str, Profile]:
    """Return all profiles by their names."""
    by_name = {
        "VGG-16": profile.read_graph_txt(vgg16.graph_txt()),
        "AlexNet": alexnet(),
        "ResNet-50": resnet50(),
        "GPT": gpt(),
    }
    return by_name | {f"random {seed}": random_chain(seed) for seed in range(6)}


def alexnet() -> Profile:
    """AlexNet in one tower (arXiv 1404.5997): layers with the pooling that follows them."""
    convolutions = [(3, 64, 11, 55, 27), (64, 192, 5, 27, 13), (192, 384, 3, 13, 13), (384, 256, 3, 13, 13)]
    convolutions.append((256, 256, 3, 13, 6))
    layers = [
        _of_images(f"conv{at}", (size * side) ** 2 * into * out, after**2 * out, size**2 * into * out)
        for at, (into, out, size, side, after) in enumerate(convolutions, start=1)
    ]
    sizes = [256 * 6**2, 4096, 4096, 1000]
    layers += [
        _of_images(f"fc{at}", into * out, out, into * out)
        for at, (into, out) in enumerate(pairwise(sizes), start=6)
    ]
    return Profile.chain(layers)


def resnet50() -> Profile:
    """ResNet-50 (arXiv 1512.03385) as a chain of its stem, its 16 blocks and its classifier."""
    layers = [_of_images("stem", (7 * 112) ** 2 * 3 * 64, 56**2 * 64, 7**2 * 3 * 64)]
    into = 64
    for number, (inner, blocks, side) in enumerate([(64, 3, 56), (128, 4, 28), (256, 6, 14), (512, 3, 7)]):
        for block in range(blocks):
            weights = into * inner + 9 * inner**2 + 4 * inner**2 + (4 * inner * into if block == 0 else 0)
            layers.append(
                _of_images(f"block {number}.{block}", side**2 * weights, side**2 * 4 * inner, weights)
            )
            into = 4 * inner
    return Profile.chain([*layers, _of_images("classifier", into * 1000, 1000, into * 1000)])


def gpt() -> Profile:
    """A GPT with 24 layers of hidden size 2,048, 2,048 tokens and a vocabulary of 128,256, in bf16."""
    hidden, tokens, vocabulary, two_bytes = 2048, 2048, 128_256, 2
    output, table = two_bytes * tokens * hidden, hidden * vocabulary

    def layer(name: str, multiplications: float, weights: float) -> ProfiledLayer:
        forward = 2 * multiplications / TEXT_RATE
        return ProfiledLayer(name, forward, 2 * forward, output, two_bytes * weights)

    attention = 2 * tokens**2 * hidden
    return Profile.chain(
        [
            layer("embedding", tokens * hidden, table),
            *(layer(f"layer {at}", tokens * 12 * hidden**2 + attention, 12 * hidden**2) for at in range(24)),
            layer("output", tokens * table, table),
        ]
    )


def random_chain(seed: int) -> Profile:
    """12 layers of 10 to 100 ms, with outputs of 1 to 300 MB and weights of 0.1 to 500 MB."""
    draw = np.random.default_rng(seed)
    return Profile.chain(
        ProfiledLayer(f"{at}", forward, 2 * forward, 10**output, 10**weights)
        for at, (forward, output, weights) in enumerate(
            zip(
                draw.uniform(0.003, 0.03, 12).tolist(),
                draw.uniform(6, 8.5, 12).tolist(),
                draw.uniform(5, 8.7, 12).tolist(),
                strict=True,
            )
        )
    )


def _of_images(name: str, multiplications: float, outputs: float, weights: float) -> ProfiledLayer:
    forward = 2 * IMAGES * multiplications / IMAGE_RATE
    return ProfiledLayer(name, forward, 2 * forward, 4 * IMAGES * outputs, 4 * weights)
