"""SGLang's own routes: /generate in SGLang's shape and in a plain one, /abort_request and information about the model.
Start reading in `endpoint.py`, at `generate_endpoint`."""
