// Makes an authority and the certificates that it signs, for tests of TLS.
#pragma once

#include <filesystem>
#include <memory>
#include <string>

namespace prefixd::testing {

class Authority {
 public:
  // Writes NAME.pem, its own certificate, into `dir`, where all its files go.
  explicit Authority(std::filesystem::path dir, const std::string& name = "authority");
  ~Authority();
  Authority(const Authority&) = delete;
  Authority& operator=(const Authority&) = delete;

  std::string ca() const { return (dir_ / (name_ + ".pem")).string(); }
  // Writes NAME.pem, with the names that it is for ("DNS:localhost,IP:127.0.0.1"), and NAME.key,
  // which its owner alone may read. The certificate is valid until `days` from now.
  void Issue(const std::string& name, const std::string& for_names = "DNS:localhost,IP:127.0.0.1",
             int days = 1) const;
  std::string certificate(const std::string& name) const {
    return (dir_ / (name + ".pem")).string();
  }
  std::string key(const std::string& name) const { return (dir_ / (name + ".key")).string(); }

 private:
  struct Keys;
  const std::filesystem::path dir_;
  const std::string name_;
  std::unique_ptr<Keys> keys_;
};

}  // namespace prefixd::testing
