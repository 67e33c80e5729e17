#pragma once

#include <filesystem>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "parlat/io/safetensors.h"

namespace parlat {

// The tensors of a Hugging Face model directory by name, over all its shards. Opening collects what is wrong instead of
// stopping at the first: shards that are missing or broken, index and shards that contradict each other, tensors that
// exist twice. Names lose the prefix "language_model." that multimodal models put before the text model's.
class ShardSet {
 public:
  // Throws DataError where there is neither a sound model.safetensors nor a readable index.
  ShardSet(const std::filesystem::path& directory, std::vector<std::string>& problems);

  bool contains(const std::string& name) const { return where_.contains(name); }
  // True for a tensor that the index places in a shard which could not be read: reported already.
  bool lost(const std::string& name) const { return lost_.contains(name); }
  // A view of the mapped file.
  Tensor tensor(const std::string& name) const;
  const std::string& file_of(const std::string& name) const { return files_.at(where_.at(name).file).name; }
  std::vector<std::string> names() const;
  // What the folder's weights are read from: the shards that could be opened, and the index if there is one.
  std::vector<std::string> files() const;
  bool multimodal() const { return multimodal_; }

 private:
  struct Shard {
    std::string name;
    SafetensorsFile file;
  };
  struct Place {
    size_t file;
    std::string name_in_file;
  };
  std::map<std::string, std::string> read_index(const std::filesystem::path& path, std::vector<std::string>& problems);
  void open(const std::filesystem::path& directory, const std::string& file, std::vector<std::string>& problems);

  void add(const std::string& file, SafetensorsFile shard, std::vector<std::string>& problems);

  std::vector<Shard> files_;
  bool indexed_ = false;
  std::map<std::string, Place> where_;
  std::set<std::string> lost_;
  bool multimodal_ = false;
};

}  // namespace parlat
