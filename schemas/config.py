"""The configuration of a run: every key is documented here and nowhere else.

Symbols are the paper's: `N` executions a group, `B` groups a training step, `mu` steps a burst, `phi` extra dispatch in
units of `B`. `schemas.config_file` reads it, `schemas.config_checks` says what types cannot.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from schemas.ids import in_pool


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all sections: frozen, unknown keys refused. (msgspec does not inherit `kw_only`, so each class says it.)"""


class Cells(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    count: int = 3
    """K: elastic cells; `cell-0` is the core."""
    capacity: int = 16
    """C_e: executions that one cell serves in the rollout role (equation 1)."""
    trainable: int = 1
    """How many cells, from the core on, may take the training role. With `async` they have it for the whole run."""

    pool: int = 0
    """Engines of a separate pool that only serves, `pool-0` and so on; they never change their role."""
    pool_capacity: int = 16
    """Executions that one of them serves: C_s = pool * pool_capacity."""

    @property
    def C_s(self) -> int:
        """Executions that the separate pool serves (equation 1)."""
        return self.pool * self.pool_capacity

    def capacity_of(self, name: str) -> int:
        """Executions that the cell or pool engine of this name serves."""
        return self.pool_capacity if in_pool(name) else self.capacity

    def trainers(self, added: int) -> int:
        """How many may train once `added` more cells belong to the run: where all may, those too."""
        return self.trainable + (added if self.trainable == self.count else 0)


class Scheduler(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    strategy: Literal["elastic", "colocate", "async"] = "elastic"
    """Who trains when. `elastic`, the paper's: one cell after the other as outstanding work fits without it. `colocate`:
    all cells together, once what is outstanding fits without them. `async`: the first `cells.trainable` cells train for
    the whole run, the others serve."""
    N: int = 16
    """Executions a group that count: its baseline, and the divisor of the loss."""
    oversample: int = 0
    """Executions that a group is given beside its N. It closes when N of them are valid, and the others are cancelled; so a
    few that fail, or last long, hold no group up. They take slots like all others until then."""
    B: int = 32
    """Groups a training step."""
    mu: int = 3
    """Training steps a burst; weights are published after the last."""
    phi: float = 0.5
    """Extra dispatch in units of B; `phi * B` must be an integer."""
    rho_min: float = 0.125
    """Least share of B that must be ready and unclaimed before a cell may join training."""
    tau_s: float = 60.0
    """Seconds for which the supply check must hold without a break."""
    streaming: bool = True
    """Whether a batch is trained while its groups get ready. Off: a burst's first micro-step waits until all of its
    `mu * B` groups are ready."""

    @property
    def group_size(self) -> int:
        """Executions that are dispatched for a group: what d, w and (3) count."""
        return self.N + self.oversample


class Policy(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    path: str = "policy"
    """Folder with `config.json`, `model.safetensors` and `tokenizer.json`; relative to the cache folder, or absolute."""


class Tasks(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    path: str = "tasks"
    """Folder of task folders in Harbor's format; relative to the cache folder, or absolute."""


class Eval(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    path: str = ""
    """Folder of held-out tasks in Harbor's format, like `tasks.path`; none of them may be a training task."""
    every: int = 0
    """Training steps between two measurements, looked at when weights are published. The starting and the last version
    are measured too. 0: nothing is measured."""
    executions: int = 16
    """Executions of one measurement: the held-out tasks in a seeded order, the same each time, repeated if fewer."""
    temperature: float | None = None
    """Sampling temperature of their calls, 0 for the most likely token; left out, `proxy.temperature`."""


class Prepare(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    makes: str
    """File or folder under the cache folder that the command makes; when it is there already the command is not run."""
    command: list[str]
    """`{python}`, `{out}` and `{here}` (folder of the configuration file) are filled in."""


class Harness(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    command: list[str]
    """Program of the harness; `{python}`, `{here}`, `{instruction}` (a file) and `{report}` (a file) are filled in."""
    env: dict[str, str] = {}
    """Added to the small clean environment of the harness. `{env:NAME}` stands for a variable of the harness service's
    own environment: write secrets so, since the configuration goes into the log."""
    model: str = "policy"
    """Model name that the harness is told."""
    timeout_s: float = 600.0
    """Harness time-out: the execution is stopped and what it left is scored."""
    overall_timeout_s: float = 900.0
    """Budget of the whole execution, evaluation included. A model call for which no engine is ready waits as long as it
    lasts."""


class Proxy(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    count: int = 1
    """Proxy processes. One is called `proxy`; several are `proxy-0` and so on, each with executions of its own, and each
    serves and seals those of the others too."""
    port: int = 0
    """0 takes a free port. Of several proxies the n-th takes the n-th port from here on."""
    temperature: float = 1.0
    """Sampling temperature of every call (but see `eval.temperature`); what the harness asks for is recorded and
    overridden."""
    max_new_tokens: int = 4096
    """Upper bound on the answer's length; a harness may ask for less."""
    ping_s: float = 10.0
    """Seconds between keep-alive pings while an answer is being made; at most 15."""
    grace_s: float = 30.0
    """Seconds for which generation goes on after its client left."""
    most_losses: int = 5
    """Engines that one call may take with it: lost so often in a row while an engine had it, it is refused for good."""


class Rollout(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    adapter: Literal["reference"] = "reference"
    """Which engine serves a cell in the rollout role."""
    dtype: Literal["float32", "float64"] = "float32"
    context_length: int = 32768
    """Most tokens of prompt and answer together."""
    kv_tokens: int = 65536
    """Size of the KV cache in tokens."""
    threads: int = 1
    drain_s: float = 5.0
    """Seconds that a cell which leaves for training waits for its calls to move; then it aborts them itself."""
    lost_s: float = 120.0
    """Seconds for which a cell's rollout process may be unreachable; then its executions move to other cells."""
    transport: Literal["auto", "mooncake", "shared-memory"] = "auto"
    """How weights travel; `auto` prefers the Mooncake Transfer Engine and says which it took."""


class Evaluator(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    workers: int = 2
    """Evaluations that one evaluator runs at a time."""
    timeout_s: float = 120.0
    """Bound of one evaluation; past it the evaluation failed and may be retried."""


class Trajectories(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    J_max: int = 5
    """Most trajectories that one execution may contribute (section 'Trajectory sampling')."""
    database: str = ""
    """SQLAlchemy URL; empty means SQLite in the run's folder. A password is written `{env:NAME}`."""
    advantage: Literal["mean_std", "mean"] = "mean_std"
    """Group-relative advantage: (r - mean) / (std + 1e-4), or r - mean."""


class Packer(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    T: int = 16384
    """Most tokens of a micro-step; an execution that is longer alone gets a micro-step of its own."""
    reorder_groups: int = 2
    """Groups that may be open for packing at a time."""
    ahead: int = 2
    """Micro-steps kept enqueued and unclaimed; the packer pulls the next group when fewer are."""


class Trainer(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    lr: float = 1e-6
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    grad_clip: float = 1.0
    ratio_cap: float = 5.0
    """Cap of the token importance ratio, without gradient."""
    clip_low: float = 0.995
    clip_high: float = 1.005
    """Interval of the execution-level sequence ratio s_i (equation 5)."""
    loss_cap: float = 100.0
    threads: int = 1
    keep_checkpoints: int = 2
    """Newest checkpoints that are kept. The version published last is kept beside them: no run goes back behind it."""
    lost_s: float = 60.0
    """Seconds for which a satellite's trainer may be unreachable; then its batch goes on without it."""


class Bus(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    url: str = ""
    """A running NATS server; empty starts one in the state folder."""
    port: int = 0
    """Port of the server that we start; 0 takes a free port."""


class Config(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str
    seed: int = 0
    steps: int = 20
    """Training steps; a multiple of `mu`."""
    cells: Cells = Cells()
    scheduler: Scheduler = Scheduler()
    policy: Policy = Policy()
    tasks: Tasks = Tasks()
    eval: Eval = Eval()
    prepare: list[Prepare] = []
    harness: Harness
    proxy: Proxy = Proxy()
    rollout: Rollout = Rollout()
    evaluator: Evaluator = Evaluator()
    trajectories: Trajectories = Trajectories()
    packer: Packer = Packer()
    trainer: Trainer = Trainer()
    bus: Bus = Bus()
