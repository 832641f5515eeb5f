"""Makes the call that ends Ray 2.60's control service without a token, as another user."""

import os
import subprocess
import sys

OTHER_USER = 65_534
CALL = """
import grpc, os, sys
grpc.insecure_channel("127.0.0.1:1").close()  # it imports more, and the other user may not read this Python's files
if os.getuid() == 0:
    os.setgroups([]), os.setgid(int(sys.argv[2])), os.setuid(int(sys.argv[2]))
channel = grpc.insecure_channel("127.0.0.1:" + sys.argv[1])
stream = channel.stream_stream("/ray.rpc.syncer.RaySyncer/StartSync")
try:
    list(stream(iter([b""]), timeout=10))
except grpc.RpcError as error:
    print(error.code().name, error.details(), flush=True)
os._exit(0)  # gRPC, whose call was refused, may wait for ever at an ordinary exit
"""


def start_sync(port: int) -> str:
    """Return what another user gets; without one, this process without its token calls."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    command = [sys.executable, "-c", CALL, str(port), str(OTHER_USER)]
    done = subprocess.run(command, capture_output=True, text=True, cwd="/", env=environment, timeout=60, check=True)
    return done.stdout
