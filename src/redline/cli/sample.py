"""redline sample"""

from __future__ import annotations

from typing import Annotated

import typer

from redline.cli.options import (
    MOST_TOKENS,
    BaseOption,
    DeviceOption,
    JsonOption,
    ModelArgument,
    SetOption,
    TemperatureOption,
    TopKOption,
    TopPOption,
    WeightsOption,
)


def sample(
    run: ModelArgument = "latest",
    prompt: Annotated[str, typer.Option(metavar="TEXT", help="The text to continue, or the question to answer.")] = "",
    plain: Annotated[
        bool, typer.Option("--plain", help="Continue the prompt as it is, without the chat template.")
    ] = False,
    tokens: Annotated[
        int, typer.Option(min=1, max=MOST_TOKENS, metavar="N", help="Most tokens of one continuation.")
    ] = 200,
    count: Annotated[int, typer.Option(min=1, max=10_000, metavar="N", help="Number of continuations.")] = 1,
    temperature: TemperatureOption = 0.8,
    top_k: TopKOption = None,
    top_p: TopPOption = 0.95,
    seed: Annotated[
        int, typer.Option(min=0, max=2**63 - 1, metavar="N", help="The same seed gives the same text.")
    ] = 0,
    settings: SetOption = None,
    base: BaseOption = None,
    weights: WeightsOption = None,
    device: DeviceOption = "auto",
    json_: JsonOption = False,
) -> None:
    """Generate text from a prompt.

    A model that was fine-tuned on conversations answers the prompt; any other continues it.

    Examples:
      redline sample latest --prompt "def "
      redline sample runs/quickstart-20261115-101500@best --count 3 --temperature 0.7
      redline sample HuggingFaceTB/SmolLM2-135M-Instruct --prompt "Why is the sky blue?"
    """

    def log(text: str) -> None:
        typer.echo(text, err=True)

    from redline.evaluate.named_model import open_model

    trained = open_model(
        run, log=log, weights=weights, base=base, settings=settings or (), device=device, writes_only=True
    )
    from redline.jobs.objective import Sampling

    sampling = Sampling(count, tokens, seed, temperature, top_k, top_p)
    objective = trained.objective
    objective.log = log
    from redline.evaluate.measure import sample_model

    samples = sample_model(trained, prompt, sampling, plain=plain)
    if json_:
        import json

        rows = [{"prompt": s.prompt, "text": s.text} for s in samples]
        typer.echo(json.dumps({**trained.as_dict(), "samples": rows}))
        return
    for one in samples:
        typer.secho(one.prompt, bold=True, nl=objective.can_answer and not plain)
        typer.echo(one.text)
        if count > 1:
            typer.echo("—" * 40)
