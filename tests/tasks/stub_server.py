"""A server that tells what a launch asks, and no more: it starts in no time. Its draft's `mark` says which it is.

As ours it drains before it ends, and tells whoever looks at its health to send no more while its leave file is there.
GET /work takes a moment, and as long as there is a `hold` beside the mark, with which it is answered.
Arguments: --draft FOLDER --state-file FILE [--host HOST] [--port PORT] [--leave-file FILE], as server_command writes.
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
WORK_SECONDS = 0.25  # longer than it drains: whoever ends it while it works loses that request


def main() -> None:
    flags = dict(zip(sys.argv[1::2], sys.argv[2::2], strict=True))
    state, draining = Path(flags["--state-file"]), threading.Event()
    draft, leave = Path(flags["--draft"]), Path(flags.get("--leave-file", "/nonexistent"))
    mark, hold = (draft / "mark").read_text(), draft / "hold"
    host, working, lock = flags.get("--host", "127.0.0.1"), [0], threading.Lock()
    settings = {
        "pid": os.getpid(),
        "model": "stub",
        "target": {"directory": "t", "fingerprint": "t"},
        "draft": {"fingerprint": mark},
        "row_invariance": {"detail": "stub", "promise": "none", "invariant": False},
        **dict.fromkeys(("num_steps", "choose_steps", "verify_width", "slots", "dtype", "threads", "fingerprint")),
    }

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            code, body = 200, settings
            if self.path == "/health":
                phase = "draining" if draining.is_set() else "left" if leave.exists() else "ready"
                code, body = 200 if phase == "ready" else 503, {"phase": phase, "in_flight": working[0]}
            elif self.path == "/work":
                with lock:
                    working[0] += 1
                time.sleep(WORK_SECONDS)
                while hold.exists():
                    time.sleep(0.02)
                body = mark
            data = json.dumps(body).encode()
            self.send_response(code)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)
            if self.path == "/work":
                with lock:
                    working[0] -= 1

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer((host, int(flags.get("--port", 0))), Handler)
    port = server.server_address[1]

    def end(*_: object) -> None:
        draining.set()
        threading.Thread(target=lambda: (time.sleep(DRAIN_SECONDS), os._exit(0))).start()

    signal.signal(signal.SIGTERM, end)
    part = state.with_suffix(".part")
    part.write_text(json.dumps({"host": host, "port": port, "url": f"http://{host}:{port}"}))
    part.rename(state)
    server.serve_forever()


if __name__ == "__main__":
    main()
