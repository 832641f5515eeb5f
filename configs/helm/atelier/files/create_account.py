"""Creates an account and a key for both interfaces, and stores them in a Secret.

    create_account.py --secret NAME … ACCOUNT

Runs in a pod whose service account may read and patch that Secret. Run again, it changes nothing.
"""

import argparse
import json
import os
import ssl
import subprocess
import urllib.request
from pathlib import Path

IDENTITY = Path("/var/run/secrets/kubernetes.io/serviceaccount")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--secret", required=True)
    parser.add_argument("--plan-a", required=True)
    parser.add_argument("--plan-b", required=True)
    parser.add_argument("account")
    options = parser.parse_args()
    if secret(options.secret, "GET").get("data"):
        print(f"{options.secret} holds a key already")
        return
    if options.account not in [account["name"] for account in atelier("accounts", "list")["accounts"]]:
        plans = ("--plan-a", options.plan_a, "--plan-b", options.plan_b)
        atelier("accounts", "create", options.account, *plans, "--no-key")
    key = atelier("keys", "create", options.account, "--name", options.secret)["key"]
    secret(options.secret, "PATCH", {"stringData": {"account": options.account, "key": key}})
    print(f"{options.secret} holds the key of {options.account}")


def atelier(*words: str) -> dict:
    """The JSON of an operator's command; a failed one ends the program, and the job tries again."""
    done = subprocess.run(["atelier", *words, "--json"], stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout)


def secret(name: str, method: str, change: dict | None = None) -> dict:
    """Read or patch a Secret through the Kubernetes API."""
    identity = Path(os.environ.get("ATELIER_KUBERNETES_IDENTITY", IDENTITY))
    api = os.environ.get("ATELIER_KUBERNETES_API", "https://kubernetes.default.svc")
    request = urllib.request.Request(
        f"{api}/api/v1/namespaces/{(identity / 'namespace').read_text()}/secrets/{name}",
        method=method,
        data=None if change is None else json.dumps(change).encode(),
        headers={
            "Authorization": f"Bearer {(identity / 'token').read_text()}",
            "Content-Type": "application/merge-patch+json",
        },
    )
    trust = ssl.create_default_context(cafile=identity / "ca.crt") if api.startswith("https:") else None
    with urllib.request.urlopen(request, timeout=30, context=trust) as answer:
        return json.load(answer)


if __name__ == "__main__":
    main()
