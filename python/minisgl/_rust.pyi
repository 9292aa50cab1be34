from typing import TypedDict

class BuildInfo(TypedDict):
    version: str
    profile: str
    features: list[str]

def build_info() -> BuildInfo: ...
