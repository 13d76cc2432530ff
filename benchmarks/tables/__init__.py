"""Tables of README and docs/, drawn from the rows in results/ and benchmarks/data; `render.py` puts them there."""
