"""Checks of the chart, the Dockerfile and the scripts that need no cluster. Run by .ci/deploy-checks, which fetches the tools.

Each check is one line of output when it fails and nothing when it passes; the last line counts them.
"""

import concurrent.futures
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile

import jsonschema
import yaml

ROOT = pathlib.Path(__file__).resolve().parent.parent
CHART = ROOT / "deploy/helm/quire"
TOOLS = ROOT / ".tools"
# Oldest, middle and newest release that the chart promises.
KUBE = ["1.30", "1.33", "1.37"]
# None: the chart's defaults.
VALUES = [None, *sorted(CHART.glob("ci/*-values.yaml"))]

passed, failed = 0, 0


def check(what, ok, detail=""):
    global passed, failed
    if ok:
        passed += 1
    else:
        failed += 1
        print(f"FAILED {what}{': ' if detail else ''}{str(detail).strip()}")
    return ok


def sh(*command, **kwargs):
    return subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=120, **kwargs)


def helm(*arguments):
    env = {**os.environ, **{f"HELM_{kind}_HOME": str(TOOLS / "helm") for kind in ("CACHE", "CONFIG", "DATA")}}
    return sh(TOOLS / "bin/helm", *arguments, env=env)


def render(values=None, kube="1.33", sets=(), release="r"):
    arguments = ["template", release, CHART, "--namespace", "ns", "--kube-version", kube]
    if values:
        arguments += ["--values", values]
    for item in sets:
        arguments += ["--set-json" if "=[" in item or "={" in item else "--set", item]
    return helm(*arguments)


def name_of(values):
    return values.name if values else "defaults"


# --- rendering ---------------------------------------------------------------------------------------------------------


def lint(values):
    result = helm("lint", "--strict", CHART, *(["--values", values] if values else []))
    return f"helm lint --strict, {name_of(values)}", result.returncode == 0, result.stdout + result.stderr


def validate(values, kube, folder):
    """Renders and checks every document against the schemas of that Kubernetes release."""
    result = render(values, kube)
    what = f"render for Kubernetes {kube}, {name_of(values)}"
    if result.returncode:
        return what, False, result.stderr
    # Custom resources have no schema there: they are checked by CRD_SCHEMAS.
    documents = [d for d in yaml.safe_load_all(result.stdout) if d and not is_custom(d)]
    path = pathlib.Path(folder) / f"{name_of(values)}-{kube}.yaml"
    path.write_text(yaml.safe_dump_all(documents))
    result = sh(TOOLS / "venv/bin/kubernetes-validate", "-k", kube, "--strict", path)
    return what, result.returncode == 0, result.stdout + result.stderr


def is_custom(document):
    group = document["apiVersion"].rpartition("/")[0]
    return "." in group and not group.endswith(".k8s.io")


LABELS = {"type": "object", "additionalProperties": {"type": "string"}}
# Strict for the fields that the chart writes, from the Prometheus operator's API reference (monitoring.coreos.com/v1).
CRD_SCHEMAS = {
    "PodMonitor": {
        "type": "object",
        "additionalProperties": False,
        "required": ["apiVersion", "kind", "metadata", "spec"],
        "properties": {
            "apiVersion": {"const": "monitoring.coreos.com/v1"},
            "kind": {"const": "PodMonitor"},
            "metadata": {"type": "object"},
            "spec": {
                "type": "object",
                "additionalProperties": False,
                "required": ["selector", "podMetricsEndpoints"],
                "properties": {
                    "selector": {"type": "object", "additionalProperties": False, "properties": {"matchLabels": LABELS}},
                    "podMetricsEndpoints": {
                        "type": "array",
                        "items": {
                            "type": "object",
                            "additionalProperties": False,
                            "properties": {
                                "port": {"type": "string"},
                                "path": {"type": "string"},
                                "interval": {"type": "string", "pattern": "^[0-9]+(ms|s|m|h)$"},
                            },
                        },
                    },
                },
            },
        },
    }
}


# --- invariants --------------------------------------------------------------------------------------------------------


def pods(documents):
    return [d for d in documents if d["kind"] in ("Deployment", "StatefulSet")]


def selects(selector, labels):
    return bool(selector) and all(labels.get(key) == value for key, value in selector.items())


def seconds(argument):
    return int(re.fullmatch(r"(\d+)s", argument).group(1))


def flags(container):
    return dict(a[2:].split("=", 1) for a in container["args"][1:])


def invariants_of_pod(where, document):
    pod = document["spec"]["template"]["spec"]
    [container] = pod["containers"]
    of = f"{where}: {document['kind']} {document['metadata']['name']}"
    security, inside = pod["securityContext"], container["securityContext"]
    check(f"{of} runs as a user other than root", security["runAsNonRoot"] is True and security["runAsUser"] >= 10000)
    check(f"{of} has the default seccomp profile", security["seccompProfile"]["type"] == "RuntimeDefault")
    check(f"{of} can't gain privileges", inside["allowPrivilegeEscalation"] is False and not inside.get("privileged"))
    check(f"{of} has a read-only root", inside["readOnlyRootFilesystem"] is True)
    check(f"{of} drops all capabilities", inside["capabilities"] == {"drop": ["ALL"]})
    check(f"{of} shares nothing with its node", not {"hostNetwork", "hostPID", "hostIPC"} & pod.keys())
    check(f"{of} has no API token", pod["automountServiceAccountToken"] is False)
    check(f"{of} has no service links", pod["enableServiceLinks"] is False)
    image = container["image"]
    pinned = "@sha256:" in image or re.search(r":[^/:]+$", image)
    check(f"{of} has a pinned image", pinned and not image.endswith(":latest"), image)
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        check(f"{of} has a {probe} on a port that exists", container[probe]["httpGet"]["port"] in ports)
    check(f"{of} is alive while not ready", container["livenessProbe"]["httpGet"]["path"] == "/livez")
    check(f"{of} is asked whether it is ready", container["readinessProbe"]["httpGet"]["path"] == "/readyz")
    check(f"{of} has memory requested and limited", "memory" in container["resources"]["requests"] and "memory" in container["resources"]["limits"])
    given = flags(container)
    check(f"{of} listens on the ports it names", {given["port"], given["admin-port"]} == {str(p) for p in ports.values()}, given)
    sleep = container.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
    needs = sleep + seconds(given["settle"]) + seconds(given["drain-timeout"]) + 5
    check(f"{of} is not killed before it has drained", pod["terminationGracePeriodSeconds"] >= needs)
    mounts = {mount["name"] for mount in container["volumeMounts"]}
    volumes = {volume["name"] for volume in pod["volumes"]}
    volumes |= {claim["metadata"]["name"] for claim in document["spec"].get("volumeClaimTemplates", [])}
    check(f"{of} mounts volumes that exist, and all of them", mounts == volumes, (mounts, volumes))
    for variable in container.get("env", []):
        secret = re.search("KEY|TOKEN|PASSWORD|SECRET", variable["name"])
        check(f"{of} has no secret in {variable['name']}", not secret or "valueFrom" in variable)
    labels = document["spec"]["template"]["metadata"]["labels"]
    check(f"{of} selects its own pods", selects(document["spec"]["selector"]["matchLabels"], labels))
    others = {key for key in document["spec"]["selector"]["matchLabels"] if "version" in key or "chart" in key}
    check(f"{of} selects by nothing that an upgrade changes", not others, others)


def invariants(values):
    where = name_of(values)
    documents = [d for d in yaml.safe_load_all(render(values).stdout) if d]
    for document in pods(documents):
        invariants_of_pod(where, document)
    seen = [(d["kind"], d["metadata"]["name"]) for d in documents]
    check(f"{where}: nothing is there twice", len(seen) == len(set(seen)), seen)
    by_component = {}
    for document in pods(documents):
        template = document["spec"]["template"]
        labels, [container] = template["metadata"]["labels"], template["spec"]["containers"]
        by_component[labels["app.kubernetes.io/component"]] = (document, labels, {p["name"] for p in container["ports"]})
    for document in documents:
        of = f"{where}: {document['kind']} {document['metadata']['name']}"
        spec = document.get("spec", {})
        if document["kind"] == "Service":
            hits = [ports for _, labels, ports in by_component.values() if selects(spec["selector"], labels)]
            check(f"{of} selects the pods of one component", len(hits) == 1)
            check(f"{of} leads to ports that exist", all(p["targetPort"] in hits[0] for p in spec["ports"]))
        elif document["kind"] in ("PodDisruptionBudget", "PodMonitor"):
            hits = [(d, ports) for d, labels, ports in by_component.values() if selects(spec["selector"]["matchLabels"], labels)]
            check(f"{of} selects the pods of one component", len(hits) == 1)
            for endpoint in spec.get("podMetricsEndpoints", []):
                check(f"{of} scrapes a port that exists", endpoint["port"] in hits[0][1])
            if document["kind"] == "PodDisruptionBudget":
                check(f"{of} is not for a single pod", hits[0][0]["spec"].get("replicas", 2) > 1)
        elif document["kind"] == "NetworkPolicy":
            hits = [ports for _, labels, ports in by_component.values() if selects(spec["podSelector"]["matchLabels"], labels)]
            check(f"{of} selects the pods of one component", len(hits) == 1)
            named = {p["port"] for rule in spec["ingress"] for p in rule["ports"]}
            check(f"{of} admits to ports that exist", named <= hits[0], named)
            if document["metadata"]["name"].endswith("-worker"):
                [rule] = [rule for rule in spec["ingress"] if {"port": "grpc"} in rule["ports"]]
                [peer] = rule["from"]
                check(f"{of} admits routers only", selects(peer["podSelector"]["matchLabels"], by_component["router"][1]))
        elif document["kind"] == "HorizontalPodAutoscaler":
            check(f"{of} owns the replica count", "replicas" not in by_component["router"][0]["spec"])
        if document["kind"] in CRD_SCHEMAS:
            errors = list(jsonschema.Draft7Validator(CRD_SCHEMAS[document["kind"]]).iter_errors(document))
            check(f"{of} fits its schema", not errors, errors)
    router, worker = (by_component[name][0] for name in ("router", "worker"))
    listed = flags(router["spec"]["template"]["spec"]["containers"][0])["workers"].split(",")
    service, port = worker["spec"]["serviceName"], flags(worker["spec"]["template"]["spec"]["containers"][0])["port"]
    expected = [f"{worker['metadata']['name']}-{i}.{service}.ns.svc.cluster.local:{port}" for i in range(worker["spec"]["replicas"])]
    check(f"{where}: the router lists every worker by its stable name", listed == expected, listed)
    headless = [d for d in documents if d["kind"] == "Service" and d["metadata"]["name"] == service]
    check(f"{where}: that name's service is headless", len(headless) == 1 and headless[0]["spec"]["clusterIP"] == "None")
    check(f"{where}: the same values give the same output", render(values).stdout == render(values).stdout)
    for document in pods(documents):
        accepted_by_binary(where, document["spec"]["template"]["spec"]["containers"][0])


HELP = {}


def accepted_by_binary(where, container):
    """Every flag of the container is one that the program knows, where the program has been built."""
    binary = ROOT / "target/release/quire"
    verb = container["args"][0]
    if not binary.exists():
        return
    if verb not in HELP:
        result = sh(binary, verb, "--help")
        HELP[verb] = set(re.findall(r"--([a-z][a-z0-9-]*)", result.stdout)) if result.returncode == 0 else None
    if check(f"{where}: quire has a verb {verb}", HELP[verb] is not None):
        unknown = flags(container).keys() - HELP[verb]
        check(f"{where}: quire {verb} knows all its flags", not unknown, unknown)


# --- what must be refused ----------------------------------------------------------------------------------------------

# Values, and words that the message must hold.
REFUSED = [
    (["router.replicaCount=2"], ["/router", "replicaCount"]),
    (["wroker.replicas=2"], ["wroker"]),
    (["router.replicas=two"], ["/router/replicas", "integer"]),
    (["worker.replicas=0"], ["/worker/replicas"]),
    (["worker.kvBytes=lots"], ["/worker/kvBytes"]),
    (["worker.cache.type=hostPath"], ["/worker/cache/type"]),
    (["image.tag=latest"], ["/image/tag"]),
    (["image.digest=sha256:abc"], ["/image/digest"]),
    (["router.port=80"], ["/router/port"]),
    (["router.extraEnv=[{\"nam\": \"A\"}]"], ["/router/extraEnv"]),
    (["router.terminationGracePeriodSeconds=60"], ["router.terminationGracePeriodSeconds", "drain"]),
    (["worker.drainTimeoutSeconds=600"], ["worker.terminationGracePeriodSeconds", "607"]),
    (["worker.preStopSleepSeconds=30"], ["worker.terminationGracePeriodSeconds", "97"]),
    (["worker.drainTimeoutSeconds=200", "worker.terminationGracePeriodSeconds=300"], ["router.terminationGracePeriodSeconds", "longest stream"]),
    (["router.adminPort=8000"], ["router.port", "8000"]),
    (["apiKey.value=a", "apiKey.existingSecret=b"], ["apiKey.existingSecret"]),
    (["worker.cache.type=existingClaim"], ["worker.cache.existingClaim"]),
    (["worker.cache.readOnly=true"], ["worker.cache.readOnly"]),
    (["router.autoscaling.enabled=true", "router.autoscaling.minReplicas=9"], ["minReplicas"]),
]


def refused(sets, words):
    result = render(sets=sets)
    message = result.stderr
    ok = result.returncode != 0 and all(word in message for word in words)
    return f"{' '.join(sets)} is refused with a message that says why", ok, message or "it was accepted"


# --- values, their schema and their documentation -----------------------------------------------------------------------


def leaves(node, prefix=""):
    """Paths of the values that have no values of their own: an empty map or list is one, and so are resources."""
    for key, value in node.items():
        path = f"{prefix}{key}"
        if isinstance(value, dict) and value and not path.endswith(".resources"):
            yield from leaves(value, path + ".")
        else:
            yield path


def documentation():
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    paths = set(leaves(values))
    rows = set(re.findall(r"^\| `([A-Za-z.]+)` \|", (CHART / "README.md").read_text(), re.M))
    check("every value is in the README's table, and nothing else", rows == paths, rows ^ paths)
    schema = json.loads((CHART / "values.schema.json").read_text())
    jsonschema.Draft7Validator.check_schema(schema)

    def schema_paths(node, prefix=""):
        for key, value in node.get("properties", {}).items():
            path = f"{prefix}{key}"
            if "properties" in value and not path.endswith(".resources"):
                check(f"the schema is strict at {path}", value.get("additionalProperties") is False)
                yield from schema_paths(value, path + ".")
            else:
                yield path

    described = set(schema_paths(schema)) - {"global"}
    check("the schema has every value, and nothing else", described == paths, described ^ paths)
    defaults = {p: d for p, d in re.findall(r"^\| `([A-Za-z.]+)` \| `([^`]*)` \|", (CHART / "README.md").read_text(), re.M)}
    for path, text in defaults.items():
        value = values
        for key in path.split("."):
            value = value[key]
        check(f"the README's default of {path} is the real one", yaml.safe_load(text) == value, text)


# --- files that nothing here can run -------------------------------------------------------------------------------------


def dockerfile():
    folder = ROOT / "deploy/docker"
    text = (folder / "Dockerfile").read_text().replace("\\\n", " ")
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#")]
    known = {"FROM", "WORKDIR", "COPY", "RUN", "ARG", "LABEL", "USER", "ENV", "VOLUME", "EXPOSE", "STOPSIGNAL", "ENTRYPOINT", "CMD"}
    stages = []
    for line in lines:
        verb, _, rest = line.partition(" ")
        check(f"Dockerfile: {verb} is an instruction", verb in known, line)
        if verb == "FROM":
            image, _, stage = rest.partition(" AS ")
            check(f"Dockerfile: {image} has a tag that isn't latest", re.search(r":(?!latest)[\w.-]+$", image), line)
            stages.append(stage or "final")
        elif verb == "COPY":
            *sources, _ = [part for part in rest.split() if not part.startswith("--")]
            origin = re.search(r"--from=(\S+)", rest)
            if origin:
                check(f"Dockerfile: stage {origin[1]} comes before its use", origin[1] in stages[:-1], line)
            else:
                for source in sources:
                    check(f"Dockerfile: {source} exists", (ROOT / source).exists())
        elif verb in ("ENTRYPOINT", "CMD"):
            check(f"Dockerfile: {verb} is in exec form, so that signals arrive", isinstance(json.loads(rest), list))
    users = [line for line in lines if line.startswith("USER ")]
    chart = next(d for d in yaml.safe_load_all(render().stdout) if d and d["kind"] == "Deployment")
    user = chart["spec"]["template"]["spec"]["securityContext"]["runAsUser"]
    check("Dockerfile: its user is the chart's", users == [f"USER {user}:{user}"], users)
    rust = re.search(r"^rust-version = \"([\d.]+)\"", (ROOT / "Cargo.toml").read_text(), re.M)[1]
    check("Dockerfile: it builds with the workspace's Rust", f"FROM rust:{rust}-" in text)
    check("Dockerfile: the profile it builds exists", "[profile.dist]" in (ROOT / "Cargo.toml").read_text())
    kept = [line[1:] for line in (folder / "Dockerfile.dockerignore").read_text().splitlines() if line.startswith("!")]
    for path in kept:
        check(f"Dockerfile.dockerignore: {path} exists", (ROOT / path).exists())
    members = json.loads("[" + re.search(r"^members = \[(.*)\]", (ROOT / "Cargo.toml").read_text(), re.M)[1] + "]")
    check("Dockerfile.dockerignore: it lets in every crate", set(members) | {"src", "Cargo.toml", "Cargo.lock"} <= set(kept), kept)


def lints():
    scripts = [p for p in sorted((ROOT / ".ci").iterdir()) if p.is_file() and p.read_bytes().startswith(b"#!/usr/bin/env bash")]
    scripts += sorted(ROOT.glob("*.sh"))
    result = sh(TOOLS / "bin/shellcheck", "--severity=warning", *scripts)
    check("shellcheck", result.returncode == 0, result.stdout)
    rules = "{extends: default, rules: {line-length: {max: 160}, document-start: disable, comments: disable, braces: {max-spaces-inside: 1}}}"
    files = [CHART / "Chart.yaml", CHART / "values.yaml", *VALUES[1:]]
    result = sh(TOOLS / "venv/bin/yamllint", "--strict", "-d", rules, *files)
    check("yamllint", result.returncode == 0, result.stdout)


def main():
    with tempfile.TemporaryDirectory() as folder, concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        jobs = [pool.submit(lint, values) for values in VALUES]
        jobs += [pool.submit(validate, values, kube, folder) for values in VALUES for kube in KUBE]
        jobs += [pool.submit(refused, *case) for case in REFUSED]
        for job in jobs:
            check(*job.result())
        package = helm("package", CHART, "-d", folder)
        check("helm package", package.returncode == 0, package.stderr)
        # What is promised must be true: older releases are refused.
        old = render(kube="1.29")
        check("an older Kubernetes is refused", old.returncode != 0 and "kubeVersion" in old.stderr, old.stderr)
        # The validator itself must see a misspelt field.
        bad = pathlib.Path(folder) / "bad.yaml"
        bad.write_text("apiVersion: v1\nkind: Service\nmetadata: {name: a}\nspec: {portz: []}\n")
        check("the validator sees a misspelt field", sh(TOOLS / "venv/bin/kubernetes-validate", "-k", "1.33", "--strict", bad).returncode != 0)
    for values in VALUES:
        invariants(values)
    documentation()
    dockerfile()
    lints()
    if not HELP:
        print("flags were not compared with the program: target/release/quire isn't built")
    print(f"deploy checks: {passed} passed, {failed} failed")
    return 1 if failed else 0


sys.exit(main())
