"""What is assumed of a cluster on which a training is simulated. Imports neither torch nor numpy."""

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from vitline.infra.config import FrozenConfig
from vitline.vit.cost.estimate import GPUS_PER_NODE


class ClusterAssumptions(FrozenConfig):
    """Assumptions about the nodes, network, store and failures of a cluster. Each field is an option of `vitline plan cluster`."""

    gpus_per_node: PositiveInt = GPUS_PER_NODE
    """Workers of a node, each with one GPU."""
    node_hour_price: NonNegativeFloat | None = None
    """Price of one node for an hour, in USD. Nodes are paid for from start to end, also while they wait. Default: no prices."""
    step_scatter: float = Field(0.02, ge=0, le=1)
    """Standard deviation of a rank's computation of a step, over its mean. The slowest rank sets the step. 0.02 is an assumption: the
    ten-step means of a B/16 on one H200 scattered by 0.025 (tests/benchmarks/README.md); at ByteDance stragglers were common
    (arXiv:2505.05713)."""
    slow_node_speed: float = Field(1.0, gt=0, le=1)
    """Speed of the slowest node, over that of the others: 0.5 for one that computes and decodes half as fast. All ranks wait for it. 1: all
    nodes are alike."""
    link_bytes_per_s: PositiveFloat = 50e9
    """Bytes per second that a node sends to others for the sum of the gradients. 5e10: one link of 400 Gbit/s; Llama 3 had one for each
    GPU (arXiv:2407.21783, 3.3.1)."""
    link_latency_s: NonNegativeFloat = 28e-6
    """Seconds from one node to another for a message of any size. 2.8e-5: what NCCL reckons with for a tree over a network, protocol
    Simple (its file tuning.cc)."""
    decode_images_per_core_s: PositiveFloat = 676.0
    """Images per second that one decoding thread makes. 676: JPEGs of 93 kB, by the native decoder (tests/benchmarks/README.md). `vitline
    data bench` measures it."""
    store_node_bytes_per_s: PositiveFloat = 12.5e9
    """Bytes per second between a node and the store. 1.25e10: 100 Gbit/s, an assumption. `vitline data bench` measures it."""
    store_bytes_per_s: PositiveFloat = 25e9
    """Bytes per second between the store and all nodes. 2.5e10: 200 Gbit/s, the default quota of Google Cloud Storage in a region."""
    save_stall_s: NonNegativeFloat = 1.0
    """Seconds for which a save holds the steps, while tensors are copied to the host. 1 is an assumption."""
    failures_per_node_day: NonNegativeFloat = Field(0.0038, le=1_000)
    """Failures of a node in a day. 0.0038: the 419 unexpected interruptions of Llama 3 in 54 days on 2,048 nodes of 8 H100
    (arXiv:2407.21783, 3.3.4)."""
    start_s: NonNegativeFloat = 180.0
    """Seconds from a failure, or a replacement, to the next step: finding it, starting the workers, loading the checkpoint, compiling. 180
    is an assumption; a node that falls silent is found after 7 minutes."""
    replacement_s: NonNegativeFloat = 900.0
    """Seconds until a failed node is replaced. 900 is an assumption; 0 if nodes stand by."""
    least_gain: float = Field(0.8, gt=0, le=1)
    """The knee is the most nodes up to which each doubling makes the training faster by at least this share: 0.8 for 1.8 times as fast."""
    repetitions: int = Field(200, ge=20, le=10_000)
    """Simulations of each number of nodes, of which the median and the range of 90 % are shown."""
