"""Our models in `lm-eval`: the model type `gape`. `python -m gape.tasks.lm_eval` is its command with that type."""

from __future__ import annotations

from importlib import import_module


def register() -> None:
    """Make `lm-eval` know the model type `gape`; doing it again is harmless.

    Raises:
        ImportError: it is missing; says how to install it.
    """
    try:
        import_module("lm_eval.models")
        registry = import_module("lm_eval.api.registry")
    except ImportError as error:
        raise ImportError("the adapter needs lm-eval: pip install 'gape[eval]'") from error
    if "gape" not in registry.MODEL_REGISTRY:
        # The class registers itself: the decorator is the same in every version of that package.
        import_module("gape.tasks.lm_eval_model")


def main() -> None:
    """The command of `lm-eval`."""
    register()
    import_module("lm_eval.__main__").cli_evaluate()


if __name__ == "__main__":
    main()
