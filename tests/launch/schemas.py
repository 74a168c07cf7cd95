"""The parts of the schemas of Kubernetes and SkyPilot that our files use: `python tests/launch/schemas.py` writes them.

Both packages are too large for the development environment (110 and 460 MB), so they are installed into a folder of
their own, and what the files use of their schemas is kept in `schemas.json`.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import venv
from pathlib import Path
from typing import Any

KEPT = Path(__file__).with_name("schemas.json")
VERSIONS = {"kubernetes-validate": "1.37.0", "skypilot": "0.14.1"}
# Runs in the other environment. It reads documents, lets both packages judge them, and prints their schemas.
JUDGE = """
import json, sys
from importlib.resources import files
import kubernetes_validate, sky
from sky.utils import schemas
jobs, tasks = json.load(sys.stdin)
version = ".".join(kubernetes_validate.latest_version().split(".")[:2])
for job in jobs:
    for document in job:
        kubernetes_validate.validate(document, version, strict=True)
for task in tasks:
    sky.Task.from_yaml_config(task)
strict = "v" + kubernetes_validate.latest_version() + "-local-strict"
folder = files("kubernetes_validate") / "kubernetes-json-schema" / strict
names = {"Job": "job-batch-v1", "Service": "service-v1", "ConfigMap": "configmap-v1"}
found = {kind: json.loads((folder / (name + ".json")).read_text()) for kind, name in names.items()}
found["definitions"] = json.loads((folder / "_definitions.json").read_text())["$defs"]
print(json.dumps([found, {"task": schemas.get_task_schema(), "resources": schemas.get_resources_schema()}]))
"""
RULES = ("type", "required", "enum", "pattern", "minimum", "maximum", "maxProperties", "additionalProperties", "format")


def derive(jobs: list[list[dict[str, Any]]], tasks: list[dict[str, Any]]) -> dict[str, Any]:
    """Let both packages judge the files; return the parts of their schemas that these use."""
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        python = Path(folder, "bin/python")
        wanted = [f"{name}=={version}" for name, version in VERSIONS.items()]
        subprocess.run([python, "-m", "pip", "install", "--quiet", *wanted], check=True)
        judged = subprocess.run(
            [python, "-c", JUDGE], input=json.dumps([jobs, tasks]), capture_output=True, text=True, cwd=folder
        )
    if judged.returncode:
        raise AssertionError(judged.stderr[-3000:])
    kubernetes, sky = json.loads(judged.stdout.splitlines()[-1])
    documents = [document for job in jobs for document in job]
    kept: dict[str, Any] = {"versions": VERSIONS}
    for kind in ("Job", "Service", "ConfigMap"):
        values = [document for document in documents if document["kind"] == kind]
        kept[kind] = used(kubernetes[kind], values, kubernetes["definitions"])
    kept["task"] = used(sky["task"], tasks, {})
    kept["resources"] = used(sky["resources"], [task["resources"] for task in tasks], {})
    return kept


def used(schema: Any, values: list[Any], definitions: dict[str, Any]) -> Any:
    """Return the schema without descriptions, and without properties that no value has."""
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        return used(definitions[schema["$ref"].rpartition("/")[2]], values, definitions)
    kept = {rule: used(schema[rule], [], definitions) for rule in RULES if rule in schema}
    objects = [value for value in values if isinstance(value, dict)]
    if "properties" in schema:
        names = sorted({name for value in objects for name in value})
        here = {name: [value[name] for value in objects if name in value] for name in names}
        parts = schema["properties"]
        kept["properties"] = {name: used(parts[name], here[name], definitions) for name in names if name in parts}
    if "patternProperties" in schema:
        patterns = schema["patternProperties"].items()
        kept["patternProperties"] = {pattern: used(part, [], definitions) for pattern, part in patterns}
    if "items" in schema:
        items = [item for value in values if isinstance(value, list) for item in value]
        kept["items"] = used(schema["items"], items, definitions)
    for rule in ("anyOf", "oneOf"):
        if rule in schema:
            kept[rule] = [used(part, values, definitions) for part in schema[rule]]
    return kept


if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
    from test_cloud import every_job, every_task

    KEPT.write_text(json.dumps(derive(every_job(), every_task()), indent=1, sort_keys=True) + "\n")
