"""hybridpar inside of other trainers: plain DistributedDataParallel, Hugging Face Accelerate, Lightning."""
