"""Whole training steps against torchdiffeq, in one run: zero_grad, forward, backward, Adam.

python benchmarks/steps.py                                 both parts, into benchmarks/RESULTS.md,
                                                           about ten minutes
python benchmarks/steps.py --only classification           a minute or two
python benchmarks/steps.py --only likelihood --batch 16    a smaller problem

Classification: the paper's classifiers, RK4 in one step; the rival is the same model with the solve
by torchdiffeq's "rk4". Likelihood: the paper's set flow; the rival is the authors' recipe, dopri5
and its adjoint with Hutchinson's trace from one Gaussian probe by a vector–Jacobian product. Ours
are the same objective by other means, and `sampled` (beyond/likelihood.py), which estimates it.

Adam's learning rate is 0: its work is done, the weights stay, and every repetition is the same.
"""

import argparse
import copy
import sys
import time
import weakref
from pathlib import Path
from typing import NamedTuple

import torch
import torchdiffeq
from fields import Obvious
from report import machine, medians, table, write_section
from torch import nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).parent.parent))
import data
from beyond.likelihood import sampled_log_prob
from beyond.matching import matching_loss
from exnode import SetClassifier, SetFlow, base_log_prob
from solvers import Stats
from support.options import number
from support.processes import has_bfloat16, keep_memory

RIVAL = "torchdiffeq"
AMP = "ours, --amp"  # products in bfloat16
ROUNDING = 1e-6  # nats per point: closer than float32 can tell for a set of 50
# method and steps per block, by their evaluations
FIXED = [("rk4", 1), ("rk5", 1), ("rk4", 2), *(("rk5", n) for n in (2, 3, 4, 6, 8, 12))]
DRAWS = 16  # of the sampled trace, whose mean is compared as well
START = time.perf_counter()


def parse(argv=None):
    parser = argparse.ArgumentParser(
        description="Training steps against torchdiffeq's, alternating.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add, count = parser.add_argument, number(int, 1)
    add("--only", choices=("classification", "likelihood"), help="one part; None: both")
    add("--batch", type=count, help="sets in a step; None: the paper's, 64 and 128")
    add("--points", type=count, help="in a set; None: the paper's, 100 and 50")
    add("--class-repeats", type=count, default=31, help="timed steps per classifier")
    add("--repeats", type=count, default=1, help="timed steps per flow")
    add("--blocks", type=count, default=12, help="of the flow")
    add("--tolerance", type=number(float, 0), default=1e-5, help="rtol and atol of dopri5")
    help = "of the flow: as initialised, or after --train-steps of matching"
    add("--weights", nargs="+", choices=WEIGHTS, default=[*WEIGHTS], help=help)
    help = "steps of flow matching on the built-in digits that make the trained weights"
    add("--train-steps", type=count, default=100, help=help)
    help = "sets of the batch on which log-likelihoods and gradients are compared with float64"
    add("--check", type=count, default=16, help=help)
    traces = ("hutchinson", "exact")
    add("--traces", nargs="+", choices=traces, default=traces, help="of our contenders")
    help = "GB that autograd may keep in a step; a contender that keeps more is not run"
    add("--memory", type=number(float, 0), default=12.0, help=help)
    add("--threads", type=count, help="of torch; None: as it chooses")
    add("--dry", action="store_true", help="print only, do not write benchmarks/RESULTS.md")
    return parser.parse_args(argv)


def say(text):
    print(f"[{time.perf_counter() - START:7.1f} s] {text}", flush=True)


def aloud(label, call):
    """The call, with a line that says how long it took."""

    def wrapped():
        start = time.perf_counter()
        call()
        say(f"{label}: {time.perf_counter() - start:.2f} s")

    return wrapped


def training_step(model, loss):
    optimizer = torch.optim.Adam(model.parameters(), lr=0)

    def step():
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()

    return step


def gradient(model, loss):
    """∂loss/∂θ as one float64 vector; the model itself keeps no gradient."""
    grads = torch.autograd.grad(loss, list(model.parameters()))
    return torch.cat([g.flatten() for g in grads]).double()


def relative(a, b):
    return ((a - b).norm() / b.norm()).item()


def verdict(met):
    return "met" if met else "**not met**"


# ---------------------------------------------------------------------------------- classification


class BlockOnTorchdiffeq(nn.Module):
    """ExNODE's part in a classifier: z(1) by one step of torchdiffeq's rk4 (the 3/8 rule)."""

    def __init__(self, field):
        super().__init__()
        self.field = field

    def forward(self, x, mask=None):
        return torchdiffeq.odeint(self.field, x, torch.tensor([0.0, 1.0]), method="rk4")[-1]


def classifier_rows(field, x, label, repeats):
    torch.manual_seed(0)
    ours = SetClassifier(3, 40, field=field)
    rival = copy.deepcopy(ours)
    rival.block = BlockOnTorchdiffeq(rival.block.field)
    calls, errors = {}, {}
    for name, model in ((RIVAL, rival), ("ours", ours)):
        double = copy.deepcopy(model).double()
        exact = gradient(double, F.cross_entropy(double(x.double()), label))
        errors[name] = relative(gradient(model, F.cross_entropy(model(x), label)), exact)
        calls[name] = training_step(model, lambda m=model: F.cross_entropy(m(x), label))
    if has_bfloat16(x.device):

        def loss():
            with torch.autocast("cpu", torch.bfloat16):
                return F.cross_entropy(ours(x).float(), label)

        errors[AMP] = relative(gradient(ours, loss()), exact)
        calls[AMP] = training_step(ours, loss)
    say(f"classification, {field}: {repeats} rounds")
    times = medians(calls, repeats)
    for name, seconds in times.items():
        ratio = seconds / times["ours" if name == AMP else RIVAL]
        say(f"classification, {field}, {name}: {1e3 * seconds:.1f} ms, ratio {ratio:.3f}")
        yield [field, name, f"{1e3 * seconds:.1f} ms", f"{ratio:.3f}", f"{errors[name]:.1e}"]


def classification(args):
    """The section's text."""
    batch, points = args.batch or 64, args.points or 100
    split = data.load("synthetic", task="classify", points=points).train
    x, _, label, *_ = next(data.batches(split, batch))
    rows = [
        row
        for field in ("deepsets", "attention")
        for row in classifier_rows(field, x, label, args.class_repeats)
    ]
    met = all(float(row[3]) <= (0.5 if row[1] == AMP else 1) for row in rows)
    columns = ["field", "solver", "time", "ratio", "gradient error"]
    return [
        "## Training steps: classification",
        "",
        f"{machine()} Medians of {args.class_repeats} steps each, alternating.",
        f"\n`SetClassifier(3, 40)` on {batch} × {points} × 3 built-in shapes: zero_grad, forward,"
        " cross entropy, backward, Adam. RK4 in one step over [0, 1]: four evaluations. The rival"
        " is the same model with the same weights; only its solve is torchdiffeq's `rk4`, the 3/8"
        " rule where ours is the classic one. Errors are relative, in norm, to the float64 gradient"
        " of the same computation.",
        f" The ratio of `{AMP}` is to ours in float32.",
        f"\nTarget: ratios of at most 1.0, and 0.5 for `{AMP}`: {verdict(met)}.\n",
        table(columns, rows),
    ]


# -------------------------------------------------------------------------------------- likelihood


class Augmented(nn.Module):
    """(t, (x, log det)) ↦ (f, eᵀ (∂f/∂x) e) for the obvious field, by a vector–Jacobian product.

    The adjoint evaluates it with gradients on, the forward solve with gradients off, and there it
    is spared the graph of the product: a little in the rival's favour.
    """

    def __init__(self, field):
        super().__init__()
        self.field, self.noise, self.stats = field, None, None

    def forward(self, t, state):
        backward = torch.is_grad_enabled()
        self.stats.backward_nfe += backward
        self.stats.nfe += not backward
        with torch.enable_grad():
            x = state[0].requires_grad_()
            dx = self.field(x)
            (product,) = torch.autograd.grad(dx, x, self.noise, create_graph=backward)
        return dx, (product * self.noise).sum((-2, -1))


class FlowOnTorchdiffeq(nn.Module):
    """The authors' recipe, with the weights of a SetFlow."""

    def __init__(self, flow, tolerance):
        super().__init__()
        self.tolerance, self.t = tolerance, torch.tensor([0.0, flow.blocks[0].t1])
        self.blocks = nn.ModuleList(Augmented(Obvious(flow.dim)) for _ in flow.blocks)
        for theirs, ours in zip(self.parameters(), flow.parameters(), strict=True):
            theirs.data.copy_(ours.data)

    def log_prob(self, x, noise, stats):
        log_det = 0
        for block in self.blocks:
            block.noise, block.stats = noise[0], stats
            how = {"rtol": self.tolerance, "atol": self.tolerance, "method": "dopri5"}
            start = x, x.new_zeros(len(x))
            path, change = torchdiffeq.odeint_adjoint(block, start, self.t, **how)
            x, log_det = path[-1], log_det + change[-1]
        return base_log_prob(x) + log_det


class Contender(NamedTuple):
    """One way to take a step, and how it did where it was compared with float64."""

    solver: str
    gradient: str
    trace: str
    model: nn.Module
    far: float = 0.0  # log-likelihood from the reference's, in nats per point
    error: float = 0.0  # of the gradient, relative
    kept: float = 0.0  # GB between forward and backward, at the full batch

    @property
    def label(self):
        return f"{self.solver}, {self.gradient}, {self.trace}"

    def log_prob(self, x, noise, stats=None):
        stats = stats or Stats()
        if self.trace == "sampled":
            return counted_sample(self.model, x, stats)
        noise = None if self.trace == "exact" else noise
        return self.model.log_prob(x, noise=noise, stats=stats)

    def as_good_as(self, other):
        exact = self.trace != "sampled"  # which has the right mean, but a spread about it
        return exact and self.far <= max(other.far, ROUNDING) and self.error <= other.error


def counted_sample(flow, x, stats):
    """sampled_log_prob; an evaluation is a field's value, or the one trace of each block."""

    def count(*_):
        stats.nfe += 1

    hooks = [block.field.register_forward_hook(count) for block in flow.blocks]
    log_p = sampled_log_prob(flow, x)
    for hook in hooks:
        hook.remove()
    stats.nfe += len(flow.blocks)
    return log_p


class Kept:
    """A tensor that autograd saved, listed as long as it is."""

    def __init__(self, tensor, living):
        self.tensor = tensor
        living.add(self)


class Setting(NamedTuple):
    """One flow and one batch: what every contender starts from."""

    args: argparse.Namespace
    flow: SetFlow
    x: torch.Tensor
    noise: torch.Tensor
    references: dict  # trace ↦ log-likelihood and gradient of the checked sets, in float64

    def contender(self, method, gradient, trace, steps=None, dtype=None, tolerance=None):
        """Our flow, solved and differentiated in this way; steps are those of each block."""
        tolerance = tolerance or self.args.tolerance
        how = {"method": method, "rtol": tolerance, "atol": tolerance}
        how |= {"options": {"step_size": self.flow.blocks[0].t1 / steps}} if steps else {}
        model = SetFlow(self.x.shape[-1], self.args.blocks, gradient=gradient, trace=trace, **how)
        model.load_state_dict(self.flow.state_dict())
        solver = f"ours, {method}" + (f" × {steps}" if steps else "")
        return Contender(solver, gradient, trace, model.to(dtype or self.x.dtype))

    def evaluate(self, contender, dtype=torch.float32):
        """Log-likelihoods and gradient on the checked sets, and the bytes kept in between."""
        x, noise = self.x[: self.args.check].to(dtype), self.noise[:, : self.args.check].to(dtype)
        kept = weakref.WeakSet()
        hooks = (lambda saved: Kept(saved, kept), lambda saved: saved.tensor)
        with torch.autograd.graph.saved_tensors_hooks(*hooks):
            log_prob = contender.log_prob(x, noise)
        storages = {k.tensor.untyped_storage().data_ptr(): k.tensor for k in kept}
        for p in contender.model.parameters():
            storages.pop(p.untyped_storage().data_ptr(), None)
        size = sum(tensor.untyped_storage().nbytes() for tensor in storages.values())
        return log_prob.detach().double(), gradient(contender.model, -log_prob.mean()), size

    def judged(self, contender, draws=1):
        """The contender with its errors; those of an estimator are of the mean of its draws."""
        log_prob, grad, kept = zip(*(self.evaluate(contender) for _ in range(draws)))
        exact, exact_grad, _ = self.references[contender.trace.replace("sampled", "exact")]
        far = (sum(log_prob) / draws - exact).square().mean().sqrt().item() / self.x.shape[-2]
        scale, error = len(self.x) / min(self.args.check, len(self.x)), sum(grad) / draws
        contender = contender._replace(
            far=far, error=relative(error, exact_grad), kept=kept[0] * scale / 1e9
        )
        say(f"{contender.label}: {far:.1e} nats per point, gradient {contender.error:.1e}")
        return contender


def make_setting(args, weights):
    split = data.load("synthetic", points=args.points or 50).train
    torch.manual_seed(0)
    flow = SetFlow(split.dim, args.blocks)
    if weights == "trained":
        train_by_matching(flow, split, args.train_steps)
    x = next(data.batches(split, args.batch or 128, seed=1)).x
    setting = Setting(args, flow, x, torch.randn(1, *x.shape), {})
    for trace in ("exact", "hutchinson"):
        double = {"dtype": torch.float64, "tolerance": 1e-9}
        reference = setting.contender("dopri5", "checkpoint", trace, **double)
        setting.references[trace] = setting.evaluate(reference, torch.float64)
        say(f"reference: {trace} trace in float64 at 1e-9")
    return setting


def train_by_matching(flow, split, steps):
    optimizer, epoch, done = torch.optim.Adam(flow.parameters(), lr=1e-3), 0, 0
    while done < steps:
        for batch in data.batches(split, 128, epoch=epoch):
            loss = matching_loss(flow, batch.x)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            done += 1
            if done == steps:
                break
        epoch += 1
    say(f"{steps} steps of flow matching: loss {loss.item():.3f}")


def contenders(setting):
    """The rival, then ours."""
    model = FlowOnTorchdiffeq(setting.flow, setting.args.tolerance)
    rival = setting.judged(Contender(f"{RIVAL}, dopri5", "adjoint", "hutchinson", model))
    chosen = [rival]
    for trace in setting.args.traces:
        for gradient in ("adjoint", "checkpoint"):
            chosen.append(setting.judged(setting.contender("dopri5", gradient, trace)))
        method, steps, checkpoint = enough_steps(setting, rival, trace)
        backprop = setting.judged(setting.contender(method, "backprop", trace, steps))
        chosen += [checkpoint, backprop]
    if (method, steps) != ("rk4", 1):  # what training needs: 1e-3 nats per point, 1 % of a gradient
        chosen.append(setting.judged(setting.contender("rk4", "backprop", "hutchinson", steps=1)))
    return [*chosen, setting.judged(sampled(setting))]


def sampled(setting):
    """As in training: at a tolerance of 5e-4."""
    flow = setting.contender("dopri5", "backprop", "hutchinson", tolerance=5e-4)
    return flow._replace(solver="ours, dopri5 at 5e-4", trace="sampled")


def enough_steps(setting, rival, trace):
    """The fewest evaluations whose log-likelihood and gradient are as close as the rival's."""
    for method, steps in FIXED:
        tried = setting.judged(setting.contender(method, "checkpoint", trace, steps))
        if tried.as_good_as(rival):
            break
    return method, steps, tried


def likelihood_rows(setting):
    """A row per contender, the best of ours among those as close as the rival, and all ratios."""
    rival, *ours = contenders(setting)
    calls, counts = {}, {}
    for contender in (rival, *ours):
        if contender.kept <= setting.args.memory:
            calls[contender.label] = counted_step(contender, setting, counts)
    times = medians(calls, setting.args.repeats, warm_up=False)  # `judged` was one
    ratios = {label: seconds / times[rival.label] for label, seconds in times.items()}
    rows = []
    for c in (rival, *ours):
        timing = ["not run", "", "", ""]
        if c.label in times:
            timing = [f"{times[c.label]:.2f} s", f"{ratios[c.label]:.3f}", *counts[c.label]]
        row = [c.solver, c.gradient, c.trace, *timing]
        rows.append([*row, f"{c.far:.1e}", f"{c.error:.1e}", f"{c.kept:.2f} GB"])
    fit = [c for c in ours if c.label in times and c.as_good_as(rival)]
    best = min(fit, key=lambda c: ratios[c.label], default=None)
    return rows, best, ratios


def counted_step(contender, setting, counts):
    def loss():
        stats[0] = Stats()
        return -contender.log_prob(setting.x, setting.noise, stats[0]).mean()

    def run():
        step()
        counts[contender.label] = stats[0].nfe, stats[0].backward_nfe

    stats, step = [None], training_step(contender.model, loss)
    return aloud(contender.label, run)


WEIGHTS = {
    "initial": "Weights as initialised",
    "trained": "Weights after {steps} steps of flow matching (Adam 1e-3, batches of 128) on the"
    " same kind of sets",
}


def weights_text(args, weights):
    """The table of one kind of weights, and its verdict."""
    say(f"likelihood, {weights} weights")
    setting = make_setting(args, weights)
    rows, best, ratios = likelihood_rows(setting)
    probe = relative(setting.references["hutchinson"][1], setting.references["exact"][1])
    found = "no contender of ours is as close to float64 as the rival"
    if best:
        found = f"{ratios[best.label]:.3f} ({best.label})"
    mean = setting.judged(sampled(setting), DRAWS)
    columns = ["solver", "gradient", "trace", "time", "ratio", "forward", "backward"]
    return [
        f"\n{WEIGHTS[weights].format(steps=args.train_steps)}. Target: {found}:"
        f" {verdict(best is not None and ratios[best.label] <= 0.25)}. Both without error, the"
        f" gradient with one Gaussian probe and that with the exact trace are {probe:.1e} apart."
        f" `sampled` takes {ratios[mean.label]:.3f} of the rival's time; the mean of {DRAWS} draws"
        f" is {mean.far:.1e} nats per point and, in the gradient, {mean.error:.1e} off.\n",
        table([*columns, "log p", "gradient error", "kept"], rows),
    ]


def likelihood(args):
    """The section's text."""
    batch, points = args.batch or 128, args.points or 50
    check = min(args.check, batch)
    return [
        "## Training steps: likelihood",
        "",
        f"{machine()} Medians of {args.repeats} steps each, alternating; the comparison with"
        " float64 comes first and warms up.",
        f"\n`SetFlow(2, {args.blocks})`, the paper's attention blocks over [0, 0.5], on {batch} ×"
        f" {points} × 2 built-in digits: zero_grad, forward, mean negative log-likelihood,"
        f" backward, Adam; dopri5 has rtol = atol = {args.tolerance:g}. The rival is the authors'"
        " recipe: torchdiffeq's `odeint_adjoint` with its default norm, the obvious attention,"
        " Hutchinson's trace with one Gaussian probe by a vector–Jacobian product. Ours with"
        " `hutchinson` use the same probe. Fixed steps are the fewest evaluations"
        " per block, by rk4 or rk5, whose log-likelihood and gradient are as"
        f" close to the reference as the rival's (at most {FIXED[-1][1]} steps are tried).",
        "\n`forward` and `backward` count evaluations of the fields. Errors are those of a step on"
        f" the first {check} sets, against the same objective (same probe, or exact trace) in"
        " float64 with dopri5 at 1e-9: `log p` in nats per point, root mean square over the sets;"
        " the gradient's relative, in norm. `kept` is what autograd holds between forward and"
        f" backward, scaled to {batch} sets; above {args.memory:g} GB a contender is not run.",
        "\n`sampled` (`--trace sampled`) is an estimator: it solves for z alone and takes the exact"
        f" trace once per block and set, at a random time. Its errors are its spread on {check}"
        " sets, not a bias: they fall with the root of the number of sets and draws, as those of"
        " the mini-batch do, down to the error of its path. It does not count for the target.",
        "\nTarget: the best of ours takes at most 0.25 of the rival's time, with a gradient at"
        " least as close to its float64 one, and a log-likelihood at least as close (or within"
        f" {ROUNDING:g} nats per point).",
        *(line for weights in args.weights for line in weights_text(args, weights)),
    ]


def main(argv=None):
    args = parse(argv)
    keep_memory()  # as the scripts do, for all contenders
    if args.threads:
        torch.set_num_threads(args.threads)
    for name, part in (("classification", classification), ("likelihood", likelihood)):
        if args.only in (None, name):
            text = "\n".join(part(args))
            print(f"\n{text}\n")
            if not args.dry:
                write_section(f"steps-{name}", text)


if __name__ == "__main__":
    main()
