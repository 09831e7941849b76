# All images, for all their platforms. From the root of the checkout:
#
#   python3 -m scripts.image_build --bake > bake.json
#   docker buildx bake --file images/docker-bake.hcl --file bake.json [cpu nvidia amd npu]
#
# The second file brings the pinned bases of images/bases.toml, version, revision and the hash of the recipes.

variable "REGISTRY" {
  default = "" # with its slash: "registry.example/team/"
}

variable "TAG" {
  default = "dev"
}

group "default" {
  targets = ["cpu", "nvidia", "amd", "npu"]
}

group "npu" {
  targets = ["npu-a3", "npu-910b", "npu-950"]
}

target "common" {
  context = "."
  attest  = ["type=provenance,mode=max", "type=sbom"]
}

target "cpu" {
  inherits   = ["common"]
  dockerfile = "images/cpu/Dockerfile"
  platforms  = ["linux/amd64", "linux/arm64"]
  tags       = ["${REGISTRY}tokenspeed-cpu:${TAG}"]
}

target "nvidia" {
  inherits   = ["common"]
  dockerfile = "images/nvidia/Dockerfile"
  platforms  = ["linux/amd64", "linux/arm64"]
  tags       = ["${REGISTRY}tokenspeed-nvidia:${TAG}"]
}

target "amd" {
  inherits   = ["common"]
  dockerfile = "images/amd/Dockerfile"
  platforms  = ["linux/amd64"]
  tags       = ["${REGISTRY}tokenspeed-amd:${TAG}"]
}

target "npu-common" {
  inherits   = ["common"]
  dockerfile = "images/npu/Dockerfile"
  platforms  = ["linux/amd64", "linux/arm64"]
}

target "npu-a3" {
  inherits = ["npu-common"]
  args     = { SOC = "a3" }
  tags     = ["${REGISTRY}tokenspeed-npu:${TAG}-a3"]
}

target "npu-910b" {
  inherits = ["npu-common"]
  args     = { SOC = "910b" }
  tags     = ["${REGISTRY}tokenspeed-npu:${TAG}-910b"]
}

target "npu-950" {
  inherits = ["npu-common"]
  args     = { SOC = "950" }
  tags     = ["${REGISTRY}tokenspeed-npu:${TAG}-950"]
}
