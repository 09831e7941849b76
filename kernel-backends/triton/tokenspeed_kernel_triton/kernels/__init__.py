"""What runs on the device. Importing a module here imports Triton; ``loading.device_code`` does it when needed."""
