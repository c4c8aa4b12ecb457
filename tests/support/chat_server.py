"""A chat endpoint on 127.0.0.1 whose every reply a test decides."""

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


def completion(content, prompt_tokens=7, completion_tokens=3):
    """Return the JSON of a chat completion."""
    return {
        "choices": [{"index": 0, "message": {"role": "assistant", "content": content}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens},
    }


class Server:
    """Requests that a server received, and the function that answers them.

    `answer(request)` returns a status, headers and a body, or writes the reply itself.
    """

    def __init__(self, answer):
        self.answer, self.requests, self.headers = answer, [], []
        self.lock = threading.Lock()
        self.in_flight = self.most_in_flight = 0


@contextmanager
def serving(answer):
    """Serve for the time of a test.

    `answer(request, handler)` returns (status, body), or None if it has written the reply itself.
    """
    server = Server(answer)

    class Handler(BaseHTTPRequestHandler):
        disable_nagle_algorithm = True  # the body would wait 40 ms for the receipt of the headers

        def do_POST(self):
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with server.lock:
                server.requests.append(request)
                server.headers.append((self.path, dict(self.headers)))
                server.in_flight += 1
                server.most_in_flight = max(server.most_in_flight, server.in_flight)
            try:
                answer = server.answer(request, self)
            finally:
                with server.lock:
                    server.in_flight -= 1
            if answer is not None:
                status, body, *headers = answer
                content = body if isinstance(body, bytes) else json.dumps(body).encode()
                self.send_response(status)
                for name, value in (*headers, ("Content-Length", str(len(content)))):
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(content)

        def log_message(self, *args):
            pass

    class Quiet(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 64  # a connection that finds the queue full is tried anew after a second

        def handle_error(self, request, client_address):
            """Ignore a client that hung up: some tests are about that."""

    listening = Quiet(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=listening.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    server.url = f"http://127.0.0.1:{listening.server_port}/v1"
    try:
        yield server
    finally:
        listening.shutdown()
        listening.server_close()
        thread.join()
