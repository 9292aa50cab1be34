"""SGLang's own routes: /generate in its form and in a plain one, /abort_request and questions about the model. Start
reading in `endpoint.py`, at `generate_endpoint`.
"""
