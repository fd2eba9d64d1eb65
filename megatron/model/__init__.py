"""The GPT model: readable as a plain model; what is parallel about it lives in `megatron.mpu`."""
