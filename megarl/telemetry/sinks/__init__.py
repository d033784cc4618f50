"""Where figures and sample tables go besides the run directory: TensorBoard, Weights & Biases, MLflow."""
