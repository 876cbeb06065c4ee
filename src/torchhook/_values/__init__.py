"""What a value is, without any model: nested values, statistics, layouts, padding, heads, images, scores, host copies,
memory. ``tree`` is where most begin."""
