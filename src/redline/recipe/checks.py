"""What no single key can know: the contradictions between keys."""

from __future__ import annotations

from redline.errors import Problem
from redline.fields import AUTO, none_if_auto
from redline.jobs.base import job
from redline.planning.batch import solve_batch
from redline.planning.memory import MUON
from redline.planning.schedule import ONE_CYCLE
from redline.planning.shapes import SIZES
from redline.recipe.schema import Model, Recipe, Train

MOST_LAYERS = 10_000  # plans and models go through them one by one
# What follows from a width still is a 64-bit integer; d_ff follows from d_model.
_WIDEST = {**dict.fromkeys(("d_model", "heads", "kv_heads", "head_dim", "vocab"), 1 << 40), "d_ff": 1 << 42}


def contradictions(recipe: Recipe) -> list[Problem]:
    found = [*_model(recipe.model), *_stops(recipe.train), *_batch(recipe.train), *_stream(recipe)]
    found += [*_addresses(recipe), *_overlong(recipe)]
    return [*found, *_optimizer(recipe), *_schedule(recipe.train), *job(recipe.objective).problems(recipe)]


def idle(recipe: Recipe) -> list[Problem]:
    """What a person wrote to no effect. Not asked of a lock: it also has what a plan filled in, and older versions
    wrote locks with such keys."""
    return [
        *_idle_size(recipe.model),
        *_idle_beside_a_base(recipe.model),
        *_idle_stream(recipe),
        *_idle_compile(recipe.train),
    ]


def _idle_compile(train: Train) -> list[Problem]:
    if train.compile is not False or train.compile_mode == "default":
        return []
    fix = "Leave it out, or use train.compile=true."
    return [Problem("train.compile_mode", "does nothing while train.compile=false.", fix)]


def _idle_stream(recipe: Recipe) -> list[Problem]:
    if not recipe.data.stream or job(recipe.objective).reads_stream:
        return []
    what = f"is for text: objective={recipe.objective} reads all of its rows before it starts."
    return [Problem("data.stream", what, "Leave it out, or set data.stream=false.")]


def _idle_beside_a_base(model: Model) -> list[Problem]:
    if model.base is None:
        return []
    plain = Model()
    keys = [key for key in ("softcap", "init", "embedding_std") if getattr(model, key) != getattr(plain, key)]
    return [Problem(f"model.{key}", "is nothing that a base has.", "Leave it out.") for key in keys]


def _idle_size(model: Model) -> list[Problem]:
    """Beside a whole shape a size says nothing."""
    sized = dict(zip(("layers", "d_model", "heads", "d_ff"), SIZES.get(model.size or "", ()), strict=False))
    given = {key: getattr(model, key) for key in sized}
    if AUTO in given.values() or given == sized:
        return []
    told = ", ".join(f"{key} {value}" for key, value in given.items())
    fix = f"Add {' '.join(f'model.{key}=auto' for key in sized)}, or leave the size out."
    return [Problem("model.size", f"{model.size} says nothing: the recipe gives {told}.", fix)]


def _overlong(recipe: Recipe) -> list[Problem]:
    key = job(recipe.objective).overlong_key
    if recipe.data.overlong is None or key == "data.overlong":
        return []
    fix = f"Use {key}." if key else "Remove it."
    return [Problem("data.overlong", f"does nothing with objective={recipe.objective}.", fix)]


def _addresses(recipe: Recipe) -> list[Problem]:
    """They are not quoted: there may be a password in one."""
    data, model = recipe.data, recipe.model
    places = {"data.source": " ".join(part.source for part in data.parts), "data.tokenizer": data.tokenizer}
    places |= {"model.base": model.base or "", "model.init_from": model.init_from or ""}
    what, fix = "is an address; redline opens files, folders and ids of a hub.", "Fetch it first, and name the file."
    return [Problem(key, what, fix) for key, place in places.items() if "://" in place]


def _model(model: Model) -> list[Problem]:
    problems = []
    sized = dict(zip(("layers", "d_model", "heads", "d_ff"), SIZES.get(model.size or "", ()), strict=False))
    d_model, heads = (
        none_if_auto(model.d_model) or sized.get("d_model"),
        none_if_auto(model.heads) or sized.get("heads"),
    )
    kv_heads, head_dim = none_if_auto(model.kv_heads), none_if_auto(model.head_dim)
    if model.size is None and model.base is None:
        missing = [k for k in ("layers", "d_model", "heads") if getattr(model, k) == AUTO]
        problems += [Problem(f"model.{key}", "is missing.", "Give it, or model.size: auto.") for key in missing]
    if model.size == AUTO and not heads and (d_model or kv_heads):
        key = "model.d_model" if d_model else "model.kv_heads"
        problems.append(Problem("model.heads", f"is missing beside {key}.", "Give both, or leave both to model.size."))
    if model.size == AUTO and heads and not d_model:
        fix = "Give both, or leave both to model.size."
        problems.append(Problem("model.d_model", "is missing beside model.heads.", fix))
    if d_model and heads and not head_dim and d_model % heads:
        problems.append(Problem("model.heads", f"{heads} does not divide model.d_model {d_model}."))
    elif (width := head_dim or (d_model // heads if d_model and heads else 0)) % 2:
        problems.append(Problem("model.head_dim", f"{width} is odd; rotary embeddings need pairs."))
    layers = none_if_auto(model.layers) or sized.get("layers") or min(size[0] for size in SIZES.values())
    if model.base is not None:
        parts = {"model.value_embeddings": model.value_embeddings > 0, "model.skips": model.skips != "none"}
        problems += [Problem(key, "is nothing that a base has.", "Leave it out.") for key, on in parts.items() if on]
    if layers > MOST_LAYERS:
        problems.append(Problem("model.layers", f"are too many; {MOST_LAYERS:,} is the most."))
    wide = {key: most for key, most in _WIDEST.items() if (none_if_auto(getattr(model, key)) or 0) > most}
    problems += [Problem(f"model.{key}", f"is too large; {most:,} is the most.") for key, most in wide.items()]
    if model.skips != "none" and none_if_auto(model.layers) == 1:
        fix = "Leave it out, or use more model.layers."
        problems.append(Problem("model.skips", f"{model.skips} does nothing to one layer.", fix))
    if 2 * model.value_embeddings > layers:
        what = f"{model.value_embeddings} is more than half of {layers} layers: each table serves two of them."
        problems.append(Problem("model.value_embeddings", what, f"Use at most {layers // 2}, or more model.layers."))
    if heads and kv_heads and heads % kv_heads:
        problems.append(Problem("model.kv_heads", f"{kv_heads} does not divide model.heads {heads}."))
    return problems


def _stops(train: Train) -> list[Problem]:
    if train.steps or train.tokens or train.epochs or train.hours:
        return []
    fix = "Give train.steps, train.tokens, train.epochs or train.hours."
    return [Problem("train.steps", "nothing says when to stop, and the learning rate needs a horizon.", fix)]


def _batch(train: Train) -> list[Problem]:
    given = (none_if_auto(train.global_batch), none_if_auto(train.micro_batch), none_if_auto(train.accumulation))
    total, micro, accumulation = given
    if total and micro and accumulation and total % (micro * accumulation) == 0:
        return []  # right for some number of GPUs; the plan knows which
    batch = solve_batch(*given)
    return [batch] if isinstance(batch, Problem) else []


def _optimizer(recipe: Recipe) -> list[Problem]:
    """What would change nothing."""
    train, problems = recipe.train, []
    without = "Take it away, or use train.optimizer=muon or normuon."
    if train.optimizer not in MUON:
        idle = {"train.cautious": train.cautious, "train.muon_momentum_warmup": train.muon_momentum_warmup}
        idle["train.muon_steps"] = train.muon_steps != type(train).model_fields["muon_steps"].default
        what = f"does nothing with train.optimizer={train.optimizer}."
        problems += [Problem(key, what, without) for key, value in idle.items() if value]
    elif train.cautious and not train.weight_decay:
        fix = "Take it away, or give train.weight_decay."
        problems.append(Problem("train.cautious", "is about weight decay, and train.weight_decay is 0.", fix))
    own = recipe.model.base is None  # whether a base's head is its embedding is for the base to say
    if own and recipe.model.tied and none_if_auto(train.head_lr) not in (None, train.embedding_lr):
        fix = "Use train.embedding_lr, or model.tied=false."
        problems.append(Problem("train.head_lr", "does nothing while model.tied=true: the head is the embedding.", fix))
    return problems


def _schedule(train: Train) -> list[Problem]:
    """Report keys of one_cycle that another schedule does not read, and two rules for one momentum."""
    if train.schedule != ONE_CYCLE:
        given = {"train.pct_start": train.pct_start, "train.cycle_momentum": train.cycle_momentum}
        what = f"does nothing with train.schedule={train.schedule}."
        fix = f"Remove it, or use train.schedule={ONE_CYCLE}."
        return [Problem(key, what, fix) for key, value in given.items() if value is not None]
    if train.cycle_momentum is not None and train.muon_momentum_warmup:
        what = "and train.muon_momentum_warmup both set Muon's momentum."
        return [Problem("train.cycle_momentum", what, "Remove one of them.")]
    return []


def _stream(recipe: Recipe) -> list[Problem]:
    if not recipe.data.stream or not job(recipe.objective).reads_stream:
        return []
    problems = []
    if recipe.train.epochs:
        fix = "Set train.epochs=null and give train.steps, train.tokens or train.hours."
        problems.append(Problem("data.stream", "the length of an epoch is not known before the end.", fix))
    if len(recipe.data.parts) > 1:
        fix = "Prepare the mixture first (data.stream=false), or stream one source."
        problems.append(Problem("data.stream", "works with one source, not with a mixture.", fix))
    elif recipe.data.parts[0].repeat is not None:
        fix = "Leave out repeat: a stream is read again from its beginning for as long as the run lasts."
        problems.append(Problem("data.stream", "has no epochs in which a source could be repeated.", fix))
    return problems
