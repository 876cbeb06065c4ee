"""What a value is, without any model: nested values, statistics, layouts, images, scores, host copies, memory."""
