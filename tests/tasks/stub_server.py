"""A server that tells what a launch asks, and no more: it starts in no time. Its draft's `mark` says which it is.

As ours it drains before it ends. Arguments: --draft FOLDER --state-file FILE, as server_command writes them.
"""

import json
import os
import signal
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

DRAIN_SECONDS = 0.2


def main() -> None:
    flags = dict(zip(sys.argv[1::2], sys.argv[2::2], strict=True))
    state, draining = Path(flags["--state-file"]), threading.Event()
    settings = {
        "pid": os.getpid(),
        "model": "stub",
        "target": {"directory": "t", "fingerprint": "t"},
        "draft": {"fingerprint": (Path(flags["--draft"]) / "mark").read_text()},
        "row_invariance": {"detail": "stub", "promise": "none", "invariant": False},
        **dict.fromkeys(("num_steps", "choose_steps", "verify_width", "slots", "dtype", "threads", "fingerprint")),
    }

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            health = self.path == "/health"
            body = {"phase": "draining" if draining.is_set() else "ready"} if health else settings
            data = json.dumps(body).encode()
            self.send_response(503 if health and draining.is_set() else 200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    port = server.server_address[1]

    def end(*_: object) -> None:
        draining.set()
        threading.Thread(target=lambda: (time.sleep(DRAIN_SECONDS), os._exit(0))).start()

    signal.signal(signal.SIGTERM, end)
    part = state.with_suffix(".part")
    part.write_text(json.dumps({"host": "127.0.0.1", "port": port, "url": f"http://127.0.0.1:{port}"}))
    part.rename(state)
    server.serve_forever()


if __name__ == "__main__":
    main()
