"""VGG-16 as PipeDream's authors profiled it, and what their public optimizer answers.

Figures read from github.com/msr-fiddle/pipedream: profiler/image_classification/profiles/vgg16/graph.txt (a
minibatch of 64), and optimizer/optimizer_graph_hierarchical.py run with --activation_compression_ratio 1.
"""

LAYERS = (
    # forward ms, backward ms, output bytes, parameter bytes; node2 .. node41 in order
    (22.307, 24.613, 1644167168, 7168),  # Conv2d
    (4.446, 5.553, 1644167168, 0),  # ReLU
    (46.201, 113.33, 1644167168, 147712),  # Conv2d
    (4.455, 5.311, 1644167168, 0),  # ReLU
    (3.795, 5.579, 411041792, 0),  # MaxPool2d
    (15.155, 39.648, 822083584, 295424),  # Conv2d
    (2.359, 2.738, 822083584, 0),  # ReLU
    (22.062, 53.379, 822083584, 590336),  # Conv2d
    (2.513, 2.62, 822083584, 0),  # ReLU
    (2.211, 2.788, 205520896, 0),  # MaxPool2d
    (10.814, 18.335, 411041792, 1180672),  # Conv2d
    (1.377, 1.38, 411041792, 0),  # ReLU
    (17.458, 27.023, 411041792, 2360320),  # Conv2d
    (1.64, 1.463, 411041792, 0),  # ReLU
    (14.245, 33.888, 411041792, 2360320),  # Conv2d
    (1.549, 1.321, 411041792, 0),  # ReLU
    (1.169, 1.513, 102760448, 0),  # MaxPool2d
    (9.249, 14.574, 205520896, 4720640),  # Conv2d
    (1.026, 0.696, 205520896, 0),  # ReLU
    (15.359, 21.9, 205520896, 9439232),  # Conv2d
    (0.848, 0.679, 205520896, 0),  # ReLU
    (11.775, 28.67, 205520896, 9439232),  # Conv2d
    (0.881, 0.642, 205520896, 0),  # ReLU
    (0.802, 0.781, 51380224, 0),  # MaxPool2d
    (5.608, 7.381, 51380224, 9439232),  # Conv2d
    (0.784, 0.266, 51380224, 0),  # ReLU
    (4.07, 7.396, 51380224, 9439232),  # Conv2d
    (0.463, 0.19, 51380224, 0),  # ReLU
    (4.042, 8.648, 51380224, 9439232),  # Conv2d
    (0.455, 0.175, 51380224, 0),  # ReLU
    (0.553, 0.234, 12845056, 0),  # MaxPool2d
    (0, 0, 4, 0),  # Size
    (0, 0, 12845056, 0),  # View
    (2.475, 4.575, 2097152, 411058176),  # Linear
    (0.377, 0.03, 2097152, 0),  # ReLU
    (0, 0, 2097152, 0),  # Dropout
    (0.709, 0.734, 2097152, 67125248),  # Linear
    (0.277, 0.032, 2097152, 0),  # ReLU
    (0, 0, 2097152, 0),  # Dropout
    (0.393, 0.548, 512000, 16388000),  # Linear
)

SKIP = ("node32", "node34")
"""The view of node34 reads the pooled pixels as well as their size, node33; all else is a chain."""

RUNS = (
    # workers, bandwidth, straight, seconds between minibatches, seconds of data parallelism, replicas
    (4, 1e09, False, 0.205520896, 0.583206382, "3-1"),
    (4, 1e09, True, 0.411041792, 0.583206382, "-".join("1" * 4)),
    (4, 1.25e09, False, 0.1763491658666667, 0.5001918556, "3-1"),
    (4, 1.25e09, True, 0.38106300000000004, 0.5001918555999999, "-".join("1" * 4)),
    (4, 3.125e09, False, 0.17338726634666665, 0.30095699223999994, "3-1"),
    (4, 3.125e09, True, 0.26306674688, 0.30095699224, "-".join("1" * 4)),
    (4, 1.25e10, False, 0.17005564992000002, 0.20133956056000002, "3-1"),
    (4, 1.25e10, True, 0.23559000000000002, 0.20133956056, "-".join("1" * 4)),
    (8, 1e09, False, 0.10383317028571427, 0.326192577, "7-1"),
    (8, 1e09, True, 0.411041792, 0.32619257700000004, "-".join("1" * 8)),
    (8, 1.25e09, False, 0.1008413933714286, 0.2777674366, "7-1"),
    (8, 1.25e09, True, 0.381063, 0.27776743660000003, "-".join("1" * 8)),
    (8, 3.125e09, False, 0.09366112877714285, 0.16154709964000002, "7-1"),
    (8, 3.125e09, True, 0.26306674688, 0.16154709964000002, "-".join("1" * 8)),
    (8, 1.25e10, False, 0.08962728219428574, 0.10343693116000001, "7-1"),
    (8, 1.25e10, True, 0.23559000000000002, 0.10343693116, "-".join("1" * 8)),
    (16, 1e09, False, 0.056529767384615376, 0.171743635, "13-2-1"),
    (16, 1e09, True, 0.411041792, 0.171743635, "-".join("1" * 16)),
    (16, 1.25e09, False, 0.05479489083076923, 0.1458015955, "13-2-1"),
    (16, 1.25e09, True, 0.381063, 0.1458015955, "-".join("1" * 16)),
    (16, 3.125e09, False, 0.045524807826488885, 0.0835407007, "15-1"),
    (16, 3.125e09, True, 0.26306674688, 0.0835407007, "-".join("1" * 16)),
    (16, 1.25e10, False, 0.04302285882666667, 0.0524102533, "12-3-1"),
    (16, 1.25e10, True, 0.23559, 0.05241025330000001, "-".join("1" * 16)),
)


def graph_txt() -> str:
    """The profile in PipeDream's own form, its input node included."""
    lines = [
        "node1 -- Input -- forward_compute_time=17.972, backward_compute_time=0.000, "
        "activation_size=77070336.000, parameter_size=0.000"
    ]
    lines += [
        f"node{number} -- Layer -- forward_compute_time={forward}, backward_compute_time={backward}, "
        f"activation_size={output}, parameter_size={parameters}"
        for number, (forward, backward, output, parameters) in enumerate(LAYERS, start=2)
    ]
    edges = [(f"node{number}", f"node{number + 1}") for number in range(1, 1 + len(LAYERS))]
    return "\n".join([*lines, *(f"\t{a} -- {b}" for a, b in [*edges, SKIP])])
