"""Stand-in for Python in a command line: lets the fork server run it."""

import json
import os
import signal
import socket
import sys

server = socket.socket(socket.AF_UNIX)
server.connect(os.path.join(os.path.dirname(os.path.abspath(__file__)), "socket"))
words, environment = {"executable": os.path.abspath(__file__), "words": sys.argv[1:]}, dict(os.environ)
job = json.dumps({**words, "environment": environment, "folder": os.getcwd()}).encode()
socket.send_fds(server, [len(job).to_bytes(4, "big")], [0, 1, 2])
server.sendall(job)
answers = server.makefile("r")
child = int(answers.readline())
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(number, lambda number, frame: os.kill(child, number))
status = int(answers.readline() or -signal.SIGKILL)  # the server is gone, and so is its child
if status < 0:
    signal.signal(-status, signal.SIG_DFL) if -status != signal.SIGKILL else None
    os.kill(os.getpid(), -status)
sys.exit(status)
